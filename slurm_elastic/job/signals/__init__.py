"""Signals to the ranks of a step."""
