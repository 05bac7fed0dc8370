"""Trials of slurm-elastic on each supported release of Slurm.

    python -m tests.releases                    # all releases; prints a table
    python -m tests.releases 25.11 26.05        # these

docs/slurm-versions.md says what is tried, and has the table.
"""
