"""The version, read by setup.py without importing anything and compared between processes."""

__version__ = "0.1.0"
