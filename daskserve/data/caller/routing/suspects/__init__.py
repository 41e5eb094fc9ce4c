"""Requests that may have killed their replica, which are tried again alone."""
