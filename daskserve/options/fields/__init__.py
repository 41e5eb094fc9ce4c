"""The parts of option classes: their base, bounds, secrets, the names of Ray Serve and of public modules."""
