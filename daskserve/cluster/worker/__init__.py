"""What runs in a worker process: the Host, and child processes of other interpreters."""
