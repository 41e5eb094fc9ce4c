"""The control plane: decides what runs and starts it. Only the controller and the loop have side effects."""
