"""Profiles of trainings: measurements, stalls, and recommended configurations."""
