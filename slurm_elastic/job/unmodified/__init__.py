"""Support for scripts that save and load their own checkpoints, without the training library."""
