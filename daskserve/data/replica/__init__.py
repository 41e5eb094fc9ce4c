"""The replica's side of the request path: user code, its threads and loops, and its answers."""
