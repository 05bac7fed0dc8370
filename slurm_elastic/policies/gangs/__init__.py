"""Scheduling of gangs by offers: Dally as published, and what it is compared with."""
