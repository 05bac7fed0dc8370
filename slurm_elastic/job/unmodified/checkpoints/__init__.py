"""Checkpoint files of scripts without the training library: found, complete, and learned of."""
