"""Verbs of the controller: each takes the lock, calls a pure function for the change, and commits it."""
