"""Multiplexed connections between two processes, which carry requests."""
