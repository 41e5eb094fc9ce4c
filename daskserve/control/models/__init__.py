"""The models of deployments with a ``model_repository``: what is wanted, and what replicas have."""
