"""Records of what was tried on a job: shapes, execution plans, and what Slurm refused."""
