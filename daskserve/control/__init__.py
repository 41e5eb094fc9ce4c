"""The control plane: what should run, and what to do about it. Pure but for reconcile and controller."""
