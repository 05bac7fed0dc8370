"""Parts that are not installed: the container cluster, the demo, scripts for developers."""
