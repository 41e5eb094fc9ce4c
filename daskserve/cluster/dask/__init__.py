"""Dask itself: connections, clusters, values and subscriptions."""
