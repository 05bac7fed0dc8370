"""Where a job's time goes, and what to run it on: measurements, stalls, recommendations."""
