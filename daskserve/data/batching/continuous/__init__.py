"""Continuous batching: requests join and leave a running batch between its steps."""
