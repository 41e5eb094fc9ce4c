"""The routes that daskserve adds to the scheduler's HTTP server."""
