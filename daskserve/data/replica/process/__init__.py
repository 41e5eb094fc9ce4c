"""User code in a child process, with its own interpreter."""
