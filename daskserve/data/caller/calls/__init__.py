"""Calls through handles: their options, arguments, responses and streams."""
