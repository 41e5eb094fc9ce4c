"""Bodies of requests and responses, written to a user's sink."""
