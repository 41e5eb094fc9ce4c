"""What keeps tasks: a file of SQLite, Redis, or the instance itself."""
