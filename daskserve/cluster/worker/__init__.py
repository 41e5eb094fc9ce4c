"""The parts that run in a worker process: the Host, and child processes with other interpreters."""
