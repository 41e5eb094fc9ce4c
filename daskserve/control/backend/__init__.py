"""Decides which replicas of a backend start and stop next, with gangs, ranks and applications. Pure."""
