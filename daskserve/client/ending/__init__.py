"""Serving until the program ends, and what ends with it."""
