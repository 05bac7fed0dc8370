"""Placement of jobs that share a node or a GPU, by their slowdown."""
