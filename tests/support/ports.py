"""Ports for servers that start later."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

#: Below the ports that Linux gives to connections and to servers with port 0.
_RANGE = range(20_000, 32_000)


def free_port() -> int:
    """Return a free port of 127.0.0.1 that the system does not assign as a random port."""
    while True:
        port = random.SystemRandom().choice(_RANGE)
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
