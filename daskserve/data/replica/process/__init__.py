"""User code in a child process, with an interpreter of its own."""
