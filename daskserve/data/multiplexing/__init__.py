"""Model multiplexing: many models in few replicas, each loaded with its first request."""
