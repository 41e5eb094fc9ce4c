"""Actors: the registry of a worker's actors, and the calls to them."""
