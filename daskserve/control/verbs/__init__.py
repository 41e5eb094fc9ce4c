"""The decisions of the verbs: each function returns the change to the state, or raises. Pure."""
