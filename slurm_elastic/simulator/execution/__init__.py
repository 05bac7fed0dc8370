"""Replay of traces of jobs that run under several execution plans (Rubick, MLSys'25)."""
