"""Commands that start what serves: ``daskserve run`` and ``daskserve start``."""
