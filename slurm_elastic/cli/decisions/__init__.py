"""Verbs that show decisions: explain, plan and history."""
