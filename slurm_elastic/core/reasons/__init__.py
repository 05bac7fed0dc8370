"""Codes of reasons by area, and the definition of one: parameters and their kinds."""
