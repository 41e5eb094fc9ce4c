"""The replicas of one backend as a router sees them."""
