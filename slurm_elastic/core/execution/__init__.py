"""How a job computes on its GPUs."""
