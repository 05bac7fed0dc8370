"""What the environment of a batch script says of its job."""
