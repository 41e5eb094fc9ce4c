"""The page on which people watch the instances of a cluster, on the scheduler's HTTP server."""
