"""Multiplexed connections between two processes: the way of requests."""
