"""Serving until the program ends, and what stops then."""
