"""Reads requests: the head, and the body."""
