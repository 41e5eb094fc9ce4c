"""The requested changes: each verb returns the change to the state, or raises. Pure."""
