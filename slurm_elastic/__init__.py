"""slurm-elastic: makes deep-learning jobs on Slurm clusters elastic."""

__all__ = ["__version__"]

__version__ = "0.1.0"
