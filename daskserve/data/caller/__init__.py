"""The caller's side of the request path: handles, routers and what they know of replicas."""
