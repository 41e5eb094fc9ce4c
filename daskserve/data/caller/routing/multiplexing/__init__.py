"""The choice of a replica for a request that names a model."""
