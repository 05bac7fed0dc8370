"""Metrics of the controller in OpenMetrics, for Prometheus."""
