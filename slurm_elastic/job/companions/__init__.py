"""Companions of a job: batch jobs of the same user that hold further GPUs while it runs."""
