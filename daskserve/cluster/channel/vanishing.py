"""Whether the machine at the other end of a TCP connection is still there.

Problem: a machine that loses its power or its network says nothing. TCP gives it up after half a minute, as
Dask has set it, for which requests wait that others could answer; and a shorter ``TCP_USER_TIMEOUT`` would
end connections to processes that live, but do not read for a while. Choice: the kernel probes a connection
that is silent, and once a second is looked when the other kernel has last acknowledged anything. A kernel
does so however busy, blocked or stopped its processes are.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import sys
from collections.abc import Callable

logger = logging.getLogger("daskserve.channel")

PERIOD_S = 1.0

#: Of Linux's ``struct tcp_info``, see tcp(7), which only ever grows at its end: how many segments are not
#: acknowledged, how many milliseconds ago the last acknowledgement came, how many bytes were not sent yet.
_INFO = struct.Struct("=24x I 28x I 84x I")


def silence_s(info: bytes) -> float:
    """Return for how long the other kernel has been silent, from a ``struct tcp_info``."""
    if len(info) < _INFO.size:
        return 0.0
    unacked, last_ack_ms, not_sent_bytes = _INFO.unpack_from(info)
    if not_sent_bytes and not unacked:
        # The other process does not read, so its kernel is asked for room, more and more seldom: nothing can
        # be told from that.
        return 0.0
    return float(last_ack_ms) / 1000


class PeerWatch:
    """Calls ``on_lost`` once when the other machine has been silent for too long; ends with the socket.

    Parameters
    ----------
    sock : socket.socket
        A connected one; nothing is done about those that are not TCP, or where the system cannot tell.
    lost_after_s : float
        At least 3, as the kernel looks after a connection once a second at most; or 0 for never.
    """

    def __init__(self, sock: socket.socket, lost_after_s: float, on_lost: Callable[[], object]) -> None:
        self._socket = sock
        self._lost_after_s = lost_after_s
        self._on_lost = on_lost
        self._is_suspect = False
        is_tcp = sock.family in (socket.AF_INET, socket.AF_INET6)
        if sys.platform == "linux" and is_tcp and lost_after_s:
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(lost_after_s / 3)))
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
            except OSError:
                return  # it is closed already
            self._look_later()

    def _look_later(self) -> None:
        asyncio.get_running_loop().call_later(PERIOD_S, self._look)

    def _look(self) -> None:
        try:
            silent_s = silence_s(self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
        except OSError:
            return  # it is closed
        was_suspect, self._is_suspect = self._is_suspect, silent_s > self._lost_after_s
        # Twice, because this machine may have been asleep itself, and answers to its probes are on their way.
        if self._is_suspect and was_suspect:
            logger.warning("Nothing was heard of the machine of %s for %.1f s", self._peer(), silent_s)
            self._on_lost()
        else:
            self._look_later()

    def _peer(self) -> str:
        try:
            return ":".join(map(str, self._socket.getpeername()[:2]))
        except OSError:
            return "a connection that is gone"
