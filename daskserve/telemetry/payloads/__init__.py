"""Bodies of requests and answers, written to a sink of the user's."""
