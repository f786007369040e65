"""What Prometheus is told, and how it finds us."""
