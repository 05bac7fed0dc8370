"""Choice of GPUs and execution plans together."""
