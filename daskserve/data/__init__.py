"""The request path: handles and routers on the caller's side, replicas on the other side."""
