"""Model multiplexing: many models in few replicas, loaded when they are first asked for."""
