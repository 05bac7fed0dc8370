"""Predicted run times of jobs, from a site's own accounting (docs/durations.md)."""
