"""True behaviour of simulated jobs: speed, restarts, network, freezing."""
