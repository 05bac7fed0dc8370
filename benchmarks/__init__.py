"""Benchmarks: `python -m benchmarks` lists their commands; docs/benchmarks.md has the figures."""

from pathlib import Path

#: The project's folder.
ROOT = Path(__file__).resolve().parents[1]
