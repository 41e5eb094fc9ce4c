"""The dashboards for Grafana, from which `scripts/write_dashboards.py` generates the files of the package."""
