"""The stores of tasks: an SQLite file, Redis, or the instance itself."""
