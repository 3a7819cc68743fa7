"""The dashboards, one a file; each module's ``board()`` returns what Grafana loads."""
