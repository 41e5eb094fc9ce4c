"""Event loops and threads: crossing between them, waiting and deadlines."""
