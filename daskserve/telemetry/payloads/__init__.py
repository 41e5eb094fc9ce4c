"""Bodies of requests and answers, written to a user's sink."""
