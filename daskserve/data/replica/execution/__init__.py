"""Where user code runs: its threads and event loops, and the pipes to them."""
