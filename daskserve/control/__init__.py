"""The control plane: decides what should run, and starts it."""
