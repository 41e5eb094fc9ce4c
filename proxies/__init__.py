"""The HTTP side of an instance: an ASGI ingress and the servers that carry it."""
