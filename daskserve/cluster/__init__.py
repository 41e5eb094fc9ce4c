"""The only layer that imports ``distributed``: actors, channels, topics and the store."""
