"""The environment of a replica: its interpreter, packages and files."""
