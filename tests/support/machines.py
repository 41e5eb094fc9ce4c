"""Machines as network namespaces on one switch, with faults of the network, and with Dask on them.

For tests and for chaos runs on Linux, as root. Nothing leaves the namespaces.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

#: Code that runs first in a process and moves it to a machine.
ENTER = """
import ctypes, os
number = os.open("/var/run/netns/{machine}", os.O_RDONLY)
assert ctypes.CDLL(None, use_errno=True).setns(number, 0) == 0
os.close(number)
"""


class Machines:
    """Machines by name, each with an address, on one switch."""

    def __init__(self, *names: str) -> None:
        prefix = f"daskserve-{os.getpid()}"
        self._switch = f"{prefix}-switch"
        self._namespaces = {name: f"{prefix}-{name}" for name in names}
        self.addresses: Mapping[str, str] = {
            name: f"10.98.76.{number}" for number, name in enumerate(names, start=1)
        }

    # ---- the network

    def make(self) -> None:
        for namespace in (self._switch, *self._namespaces.values()):
            _run("ip", "netns", "add", namespace)
        self._ip(self._switch, "link", "add", "bridge", "type", "bridge")
        self._ip(self._switch, "link", "set", "bridge", "up")
        for name, namespace in self._namespaces.items():
            wire = (
                "link",
                "add",
                "wire",
                "type",
                "veth",
                "peer",
                "name",
                f"to-{name}",
                "netns",
                self._switch,
            )
            self._ip(namespace, *wire)
            self._ip(namespace, "addr", "add", f"{self.addresses[name]}/24", "dev", "wire")
            for connection in ("wire", "lo"):
                self._ip(namespace, "link", "set", connection, "up")
            self.plug(name)
            _run("ip", "netns", "exec", namespace, "iptables", "-S")  # it may still be forbidden

    def remove(self) -> None:
        for namespace in (self._switch, *self._namespaces.values()):
            subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)

    def unplug(self, name: str) -> None:
        """Drop all traffic from and to a machine silently."""
        self._ip(self._switch, "link", "set", f"to-{name}", "nomaster")

    def plug(self, name: str) -> None:
        """Connect a machine to the switch."""
        self._ip(self._switch, "link", "set", f"to-{name}", "master", "bridge", "up")

    def cut(self, source: str, target: str) -> None:
        """Drop all packets from one machine to another; those in the other direction pass."""
        self._filter("-A", source, target)

    def mend(self, source: str, target: str) -> None:
        """Undo `cut`."""
        self._filter("-D", source, target)

    def _filter(self, change: str, source: str, target: str) -> None:
        # At the receiver, because the sender must not notice it.
        rule = ("INPUT", "-s", self.addresses[source], "-j", "DROP")
        _run("ip", "netns", "exec", self._namespaces[target], "iptables", change, *rule)

    def _ip(self, namespace: str, *arguments: str) -> None:
        _run("ip", "-n", namespace, *arguments)

    # ---- the processes

    def enter(self, name: str) -> str:
        """Return the code that moves a Python program to a machine."""
        return ENTER.format(machine=self._namespaces[name])


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise OSError(f"`{' '.join(command)}` failed: {error.stderr.strip()}") from error


@contextmanager
def machines(*names: str) -> Iterator[Machines]:
    """Create machines; if that is not possible, raise an `OSError` that says what is missing."""
    missing = [name for name in ("ip", "iptables") if shutil.which(name) is None]
    if missing:
        raise FileNotFoundError(f"install {' and '.join(missing)} (Debian's packages iproute2 and iptables)")
    made = Machines(*names)
    try:
        made.make()
        yield made
    finally:
        made.remove()
