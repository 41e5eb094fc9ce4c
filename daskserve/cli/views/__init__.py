"""What the command prints of an instance: status, history, events."""
