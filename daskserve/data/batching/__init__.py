"""Request batching: `batch`, and the queue that it shares with `accept_batch`."""
