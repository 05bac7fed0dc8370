"""How simulated jobs really behave: speed, restarts, network, freezing."""
