"""Slowdown of jobs that share a GPU or a node."""
