"""Policies beside each other, in the simulator and on the container cluster."""
