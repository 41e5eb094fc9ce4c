"""The commands that show an instance: status, history, events."""
