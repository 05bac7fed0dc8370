"""Pipelines against data parallelism on a slow network, and the partitioner."""
