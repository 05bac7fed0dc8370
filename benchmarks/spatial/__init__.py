"""Samples that several ranks hold in slabs: memory, messages and time."""
