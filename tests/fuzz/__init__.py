"""Hostile input, a surface a module: `python -m tests.fuzz --help`, docs/security.md."""
