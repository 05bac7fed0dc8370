"""What runs inside a job without torch: standard library only."""
