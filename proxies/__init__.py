"""The HTTP side of an instance: an ASGI ingress and the servers that run it."""
