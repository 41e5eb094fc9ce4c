"""Decides where replicas run: bin packing, eviction order, rebalancing, and demand for workers. Pure."""
