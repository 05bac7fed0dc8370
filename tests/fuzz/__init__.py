"""Hostile input, one surface per module: `python -m tests.fuzz --help`, docs/security-fuzzing.md."""
