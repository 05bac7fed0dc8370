"""The fault campaign: random faults at random moments on the container cluster.

    python -m tests.chaos --minutes 5 --seed 1

docs/reliability.md says what is tried and what must hold.
"""
