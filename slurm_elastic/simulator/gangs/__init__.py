"""Simulation of gangs by offers, in the form of Dally's published runs, with its policies.

What runs live is `policies/dally`: it shares the record of a gang, and the timer of our order.
"""
