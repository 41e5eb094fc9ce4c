"""The protocols through which the layers above use a cluster."""
