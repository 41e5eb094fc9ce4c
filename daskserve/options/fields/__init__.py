"""What the classes of options are made of: base, bounds, secrets, the names of Ray Serve."""
