"""Measurements during training: step times, gradient noise, layer costs."""
