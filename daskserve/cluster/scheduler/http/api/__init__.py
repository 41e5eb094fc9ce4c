"""The REST API of the instances on a cluster, on the scheduler's HTTP server."""
