"""The caller's side of the request path: handles, routers and their view of the replicas."""
