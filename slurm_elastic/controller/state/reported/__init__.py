"""Reports of jobs as models take them: measurements, observations, layer profiles."""
