"""`selastic simulate`, `compare` and `workload`."""
