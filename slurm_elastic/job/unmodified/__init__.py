"""Scripts that save and load their own checkpoints, without the training library."""
