"""Routers: queues, the choice of a replica, retries and shadows."""
