"""Published schedulers that do not choose sizes, to compare with (docs/baselines.md).

All of them give a job the GPUs that its user asked for, or none (rigid.py).
"""
