"""What is not installed: the container cluster, the demo, helpers."""
