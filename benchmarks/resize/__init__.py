"""Resizes of each kind on the container cluster, on one machine, and in the simulator."""
