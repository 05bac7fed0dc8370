"""What cannot be tried without a GPU: `make test-gpu`, on one machine, without Slurm.

docs/gpu.md says what each part does. Nothing here needs more than torch, numpy and this tree, so
that it runs in the environment in which people train.
"""
