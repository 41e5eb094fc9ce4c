"""Which HTTP proxies run, and when a new instance may begin to listen. Pure."""
