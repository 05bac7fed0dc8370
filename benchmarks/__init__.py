"""How long things take; each module prints its figures: `python -m benchmarks.NAME`."""
