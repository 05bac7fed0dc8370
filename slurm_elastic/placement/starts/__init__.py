"""Starts of pending jobs: when they will probably come, and who gets which place."""
