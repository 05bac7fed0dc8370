"""Nodes in use, seen from the past: series and forecasts."""
