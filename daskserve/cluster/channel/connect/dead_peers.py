"""Detection of a machine that does not answer at the other end of a TCP connection.

Problem: a machine that loses power or network sends nothing. With Dask's settings, TCP gives up only after
half a minute. Until then, requests wait although other replicas could answer them. A shorter
``TCP_USER_TIMEOUT`` would end connections to live processes that do not read for a while. Choice: the kernel
probes silent connections (keepalive), and once a second a timer checks when the other kernel last
acknowledged anything. A kernel acknowledges even if its processes are busy, blocked or stopped.

If packets are lost in one direction only, the other machine's packets still arrive, because it retransmits
with old acknowledgements. So bytes that stay unacknowledged count as silence, too.
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

#: Fields of Linux's ``struct tcp_info``, which only grows at its end (see tcp(7)): unacknowledged segments,
#: milliseconds since the last packet with an acknowledgement, acknowledged bytes, bytes not sent yet.
_INFO = struct.Struct("=24x I 28x I 60x Q 16x I")


class AckProgress:
    """Measures how long the other kernel has acknowledged nothing, over successive checks of a connection.

    ``struct tcp_info`` and the time are arguments, so that tests can choose them.
    """

    def __init__(self, now: float) -> None:
        self._acked_bytes = 0
        self._progress_at = now

    def at(self, info: bytes, now: float) -> float:
        """Return the silence in seconds.

        Two cases count as silence:

        1. No packet has arrived. This does not count while this kernel sends only window probes, at growing
        intervals, because the other process does not read.
        2. Bytes are in flight, but no bytes are acknowledged. The silence begins at the last check that found
        no bytes in flight, or a new acknowledgement.
        """
        if len(info) < _INFO.size:
            return 0.0
        unacked, last_ack_ms, acked_bytes, not_sent_bytes = _INFO.unpack_from(info)
        if not unacked or acked_bytes != self._acked_bytes:
            self._acked_bytes, self._progress_at = acked_bytes, now
        unheard_s = 0.0 if not_sent_bytes and not unacked else float(last_ack_ms) / 1000
        return max(unheard_s, now - self._progress_at)


class PeerWatch:
    """Calls ``on_lost`` once when the other machine has been silent for too long; ends with the socket.

    Parameters
    ----------
    sock : socket.socket
        A connected socket. Sockets other than TCP, and systems other than Linux, are not watched.
    lost_after_s : float
        Silence after which the machine counts as lost, in seconds: at least 3, because the kernel probes at
        most once a second; 0 means never.
    """

    def __init__(self, sock: socket.socket, lost_after_s: float, on_lost: Callable[[], object]) -> None:
        self._socket = sock
        self._lost_after_s = lost_after_s
        self._on_lost = on_lost
        self._is_suspect = False
        self._silence = AckProgress(asyncio.get_running_loop().time())
        is_tcp = sock.family in (socket.AF_INET, socket.AF_INET6)
        if sys.platform == "linux" and is_tcp and lost_after_s:
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(lost_after_s / 3)))
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
            except OSError:
                return  # the socket is already closed
            self._schedule_check()

    def _schedule_check(self) -> None:
        asyncio.get_running_loop().call_later(PERIOD_S, self._check)

    def _check(self) -> None:
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        except OSError:
            return  # the socket is closed
        silent_s = self._silence.at(info, asyncio.get_running_loop().time())
        was_suspect, self._is_suspect = self._is_suspect, silent_s > self._lost_after_s
        # Two checks in a row: if this machine was suspended itself, the answers to its probes are in flight.
        if self._is_suspect and was_suspect:
            logger.warning("Lost the machine of %s: it was silent for %.1f s", self._peer(), silent_s)
            self._on_lost()
        else:
            self._schedule_check()

    def _peer(self) -> str:
        try:
            return ":".join(map(str, self._socket.getpeername()[:2]))
        except OSError:
            return "a closed connection"
