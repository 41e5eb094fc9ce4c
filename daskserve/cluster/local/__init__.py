"""A cluster in one process and one event loop, for tests."""
