"""Modules of the command `cluster`. Standard library only: it runs before anything is installed."""
