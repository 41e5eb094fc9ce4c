"""Reads the heads and bodies of requests."""
