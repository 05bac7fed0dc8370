"""Delay timers: how long a job waits for a place with faster communication."""
