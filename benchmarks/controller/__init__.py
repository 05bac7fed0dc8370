"""Costs of selasticd: rounds and their parts, reads, scrapes, idle time."""
