"""The dashboards, one per file; ``board()`` of each module returns what Grafana loads."""
