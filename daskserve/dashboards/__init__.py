"""Dashboards for Grafana and alert rules for Prometheus: one definition each, and the files made of them."""
