"""How many bytes the processes of this machine have read from a TCP connection and written to it.

The kernel counts them (Linux). So when a process that served a connection was killed, another one knows what
it had read and sent, even if it had no time to record that.
"""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

try:
    import fcntl
    import termios
except ImportError:  # Windows
    pass

#: `tcpi_bytes_acked` and `tcpi_bytes_received` of the kernel's ``struct tcp_info``.
_COUNTS = struct.Struct("=QQ")
_COUNTS_AT = 120
_ESTABLISHED = 1
_INT = struct.Struct("=i")
#: How often the counts are read again because they have changed meanwhile.
_ATTEMPTS = 10


class Transferred(NamedTuple):
    """Numbers of bytes that were read from a connection and written to it."""

    read: int
    written: int

    def since(self, earlier: Transferred) -> Transferred:
        """Return the numbers since an earlier call of `transferred`."""
        return Transferred(self.read - earlier.read, self.written - earlier.written)


def transferred(sock: socket.socket) -> Transferred | None:
    """Return how many bytes were read from a connection and written to it.

    Returns None if the kernel does not say so, or either side has ended its data.
    """
    if not hasattr(socket, "TCP_INFO"):
        return None
    try:
        found = _counts(sock)
        for _ in range(_ATTEMPTS):
            unread, unacknowledged = _waiting(sock, termios.FIONREAD), _waiting(sock, termios.TIOCOUTQ)
            before, found = found, _counts(sock)
            if found == before and found is not None:
                acknowledged, received = found
                return Transferred(received - unread, acknowledged + unacknowledged)
    except OSError:  # not a TCP connection, or a closed one
        pass
    return None


def _counts(sock: socket.socket) -> tuple[int, int] | None:
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTS_AT + _COUNTS.size)
    if len(info) < _COUNTS_AT + _COUNTS.size or info[0] != _ESTABLISHED:
        return None
    acknowledged, received = _COUNTS.unpack_from(info, _COUNTS_AT)
    return acknowledged, received


def _waiting(sock: socket.socket, request: int) -> int:
    (found,) = _INT.unpack(fcntl.ioctl(sock, request, bytes(_INT.size)))
    return int(found)
