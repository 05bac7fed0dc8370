"""Number of nodes to keep awake, and choice of those that may sleep; pure."""
