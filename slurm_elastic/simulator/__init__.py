"""Simulation of workloads with the decisions that run live; see docs/simulator.md."""
