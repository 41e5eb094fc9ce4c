"""What runs in the scheduler process: the supervisor plugin and its parts."""
