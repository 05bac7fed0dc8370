"""Predicted durations and sleeping nodes (Helios, SC'21), published and ours."""
