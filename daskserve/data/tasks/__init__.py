"""Work that outlives a request: durable queues of tasks, and the replicas that consume them."""
