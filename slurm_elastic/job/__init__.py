"""Programs and modules that run inside a job without torch: standard library only."""
