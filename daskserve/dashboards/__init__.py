"""Dashboards for Grafana and alert rules for Prometheus: the files that users install."""
