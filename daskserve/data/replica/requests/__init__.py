"""The requests of a replica: slots, batches, streams, and the response to each."""
