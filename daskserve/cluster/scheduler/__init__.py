"""The supervisor plugin, which runs in the scheduler process, and its parts."""
