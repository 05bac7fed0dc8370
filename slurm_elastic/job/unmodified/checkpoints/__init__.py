"""Checkpoint files of scripts without the training library, and when they are complete."""
