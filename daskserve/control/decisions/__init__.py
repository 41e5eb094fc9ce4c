"""Decides what a verb changes: each function returns the change to the state, or raises. Pure."""
