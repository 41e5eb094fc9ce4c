"""The controller's observations of the cluster: workers, replicas and loads."""
