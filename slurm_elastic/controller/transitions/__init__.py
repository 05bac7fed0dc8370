"""Transitions: how a planned allocation is carried out through Slurm, step by step."""
