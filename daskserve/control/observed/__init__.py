"""What the controller has seen of the cluster: workers, replicas and loads, as levels."""
