"""Metrics for Prometheus, and how it finds us."""
