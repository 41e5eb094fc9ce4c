"""Writes responses."""
