"""Idle nodes that could sleep."""
