"""Dashboards for Grafana and alert rules for Prometheus: their definitions and the generated files."""
