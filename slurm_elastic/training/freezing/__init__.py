"""Freezing of front layers that no longer learn."""
