"""slurm-elastic: makes deep-learning jobs on Slurm clusters elastic."""

__version__ = "0.1.0"
