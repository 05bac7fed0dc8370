"""Facts about a job from the environment of its batch script."""
