"""Fault campaigns: random faults at random times on the container cluster.

    python -m tests.chaos --minutes 5 --seed 1

docs/reliability-test.md says what is tried and what must hold.
"""
