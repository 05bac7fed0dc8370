"""A running step of a job, and ends that its srun is not told of."""
