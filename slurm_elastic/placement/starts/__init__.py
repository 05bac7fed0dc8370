"""When pending jobs will probably start."""
