"""The fault campaign: random faults at random moments on the container cluster.

    python -m tests.chaos --minutes 5 --seed 1

docs/reliability.md says what is tried and what must hold.
"""

import sys
from pathlib import Path

#: The cluster tests' own helpers (harness, daemon) are imported by their bare names.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cluster"))
