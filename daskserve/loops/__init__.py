"""Event loops, calls between threads, and deadlines."""
