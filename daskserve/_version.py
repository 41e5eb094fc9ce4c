"""The version, read by setup.py without importing anything and compared between processes."""

__version__ = "0.1.0"

#: Version of the messages between processes and of the records in a store; every change of a released format
#: raises it. Patch versions with the same number may mix; see `daskserve.cluster.probe.can_mix`.
PROTOCOL = 1
