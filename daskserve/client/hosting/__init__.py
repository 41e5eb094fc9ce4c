"""Runs one application as a program, as ``daskserve run`` does."""
