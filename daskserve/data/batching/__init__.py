"""The queue behind `batch` and `accept_batch`."""
