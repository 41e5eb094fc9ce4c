"""Where replicas run: fitting, order of eviction, rebalancing, and demand for workers. Pure."""
