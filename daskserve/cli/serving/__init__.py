"""Commands that start applications and instances: ``daskserve run`` and ``daskserve start``."""
