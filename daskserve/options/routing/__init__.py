"""Options of the routing of requests."""
