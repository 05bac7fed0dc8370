"""Execution plans: the division of a training among its GPUs."""
