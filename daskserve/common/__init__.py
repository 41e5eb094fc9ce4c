"""Shared by all layers: types, the clock, the settings, and numbers in messages."""
