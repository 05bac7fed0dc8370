"""Inputs of simulations: workloads, application profiles, clusters, accounting data."""
