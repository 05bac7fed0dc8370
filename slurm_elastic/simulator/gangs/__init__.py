"""Simulation of gangs by offers, in the form of Dally's published runs."""
