"""The ingress: one ASGI application that finds the endpoint of a request and calls it."""
