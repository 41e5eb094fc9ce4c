"""How many replicas a backend should have: the policies, and what tames them. Pure but for ``prometheus``."""
