"""Running one application as a program of its own, as ``daskserve run`` does."""
