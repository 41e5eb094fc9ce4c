"""The request path: routers and handles on the caller's side, replicas on the other."""
