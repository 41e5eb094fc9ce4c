"""Requests that may have killed their replica, and are retried alone."""
