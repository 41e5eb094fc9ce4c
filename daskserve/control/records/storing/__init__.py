"""How records are written to the store, and read from it."""
