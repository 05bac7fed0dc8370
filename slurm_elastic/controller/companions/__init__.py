"""Companions of jobs: further GPUs of a running job, held by small jobs of their own."""
