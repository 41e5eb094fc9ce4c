"""``daskserve metrics``: Prometheus and Grafana."""
