"""The limits that keep a few clients from taking what all share: memory, and the slots of replicas.

The models: Kestrel's ``MinRequestBodyDataRate`` (240 bytes/s, after a grace), Apache's ``RequestReadTimeout
body=20,MinRate=500``, and nginx' ``send_timeout`` (60 s between two writes that the client accepts). Unlike
with the first two, a client that has sent more than the minimum may not pause for longer: a body that is
nearly whole would hold its memory for hours.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Protocol

#: The size of ``max_buffered_bytes`` by default, in bodies of the maximum size and in bytes.
_BODIES = 8
_LEAST_BYTES = 64 << 20

# The limits that clients meet: the labels of a metric. Those with an option have its name.
BODY_SIZE = "max_body_bytes"
BUFFERS = "max_buffered_bytes"
BODY_RATE = "min_body_bytes_per_s"
WRITE_STALL = "write_stall_timeout_s"
BUSY_WRITE_STALL = "busy_write_stall_timeout_s"
UNSENT = "max_unsent_bytes"
IDLE = "keep_alive_timeout_s"
MESSAGE_SIZE = "max_websocket_message_bytes"
LINGER = "linger"
WEBSOCKET_SILENCE = "websocket_silence"
WEBSOCKET_PONGS = "websocket_pongs"
WEBSOCKET_CLOSE = "websocket_close"
WEBSOCKET_END = "websocket_end"
#: All of them.
LIMITS = (
    BODY_SIZE,
    BUFFERS,
    BODY_RATE,
    WRITE_STALL,
    BUSY_WRITE_STALL,
    UNSENT,
    IDLE,
    MESSAGE_SIZE,
    LINGER,
    WEBSOCKET_SILENCE,
    WEBSOCKET_PONGS,
    WEBSOCKET_CLOSE,
    WEBSOCKET_END,
)


class LimitOptions(Protocol):
    """The part of `daskserve.options.http.HTTPOptions` with these limits."""

    @property
    def max_body_bytes(self) -> int: ...
    @property
    def max_buffered_bytes(self) -> int | None: ...
    @property
    def min_body_bytes_per_s(self) -> int: ...
    @property
    def body_grace_s(self) -> float: ...
    @property
    def write_stall_timeout_s(self) -> float: ...
    @property
    def busy_write_stall_timeout_s(self) -> float: ...
    @property
    def max_unsent_bytes(self) -> int: ...


class Budget:
    """Bytes of memory that many users share.

    Attributes
    ----------
    own_bytes : int
        What the thread of the server uses: only this thread changes it, and needs no lock for that.
    """

    def __init__(self, size_bytes: float) -> None:
        self.size_bytes = size_bytes
        self.own_bytes = 0
        self._other_bytes = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Budget {self.used_bytes} of {self.size_bytes}>"

    @property
    def used_bytes(self) -> int:
        """What all threads use."""
        return self.own_bytes + self._other_bytes

    def take(self, size_bytes: int) -> bool:
        """Count bytes as used, and return whether they are within the budget; they are counted anyway.

        Any thread may call this and `give_back`.
        """
        with self._lock:
            self._other_bytes += size_bytes
        return self.used_bytes <= self.size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Count bytes as free."""
        with self._lock:
            self._other_bytes -= size_bytes


class Limits:
    """The limits of one server, what is used of them, and how often each has ended a request.

    Without options, nothing is limited, and no response waits for its client without its application.

    Attributes
    ----------
    received : Budget
        The request bodies and WebSocket messages that are held.
    unsent : Budget
        The responses that wait for their clients without holding a slot.
    hits : Counter
        How many requests, WebSockets and connections have met each limit; changed by `hit`.
    """

    def __init__(self, options: LimitOptions | None = None) -> None:
        self.hits: Counter[str] = Counter(dict.fromkeys(LIMITS, 0))
        self._lock = threading.Lock()
        self.min_body_bytes_per_s = 0
        self.body_grace_s = self.write_stall_timeout_s = self.busy_write_stall_timeout_s = float("inf")
        self.max_unsent_bytes = 0
        size_bytes, unsent_bytes = float("inf"), 0.0
        if options is not None:
            self.min_body_bytes_per_s = options.min_body_bytes_per_s
            self.body_grace_s = options.body_grace_s
            self.write_stall_timeout_s = options.write_stall_timeout_s
            self.busy_write_stall_timeout_s = options.busy_write_stall_timeout_s
            self.max_unsent_bytes = options.max_unsent_bytes
            size_bytes = options.max_buffered_bytes or max(_BODIES * options.max_body_bytes, _LEAST_BYTES)
            unsent_bytes = size_bytes
        self.received = Budget(size_bytes)
        self.unsent = Budget(unsent_bytes)

    def hit(self, limit: str) -> None:
        """Count one that has met a limit. Any thread may call this: WebSockets move to those of user code."""
        with self._lock:
            self.hits[limit] += 1
