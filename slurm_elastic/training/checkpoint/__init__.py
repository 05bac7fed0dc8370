"""Checkpoints: files, manifests, and the ranks that write them together."""
