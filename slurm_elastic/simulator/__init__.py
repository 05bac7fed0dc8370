"""Replays workloads through the very decisions that run live; see docs/simulator.md."""
