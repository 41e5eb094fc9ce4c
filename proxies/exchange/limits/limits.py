"""The limits that keep a few clients from using up shared resources: memory, and the slots of replicas.

The models are Kestrel's ``MinRequestBodyDataRate`` (240 bytes/s after a grace period), Apache's
``RequestReadTimeout body=20,MinRate=500``, and nginx' ``send_timeout`` (60 s between two writes that the
client accepts). Unlike with the first two, a client that has sent more than the minimum may not pause for
longer, because otherwise a nearly complete body could occupy memory for hours.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from daskserve.proxies.exchange.limits.loop_work import WorkByLoop
from daskserve.proxies.exchange.limits.memory_trimmer import MemoryTrimmer

if TYPE_CHECKING:
    from daskserve.options.http import HTTPOptions

#: The default of ``max_buffered_bytes``: this many bodies of the maximum size, but at least this many bytes.
_BODIES = 8
_LEAST_BYTES = 64 << 20

# The limits, as labels of a metric. A limit with an option has the name of the option.
BODY_SIZE = "max_body_bytes"
BUFFERS = "max_buffered_bytes"
BODY_RATE = "min_body_bytes_per_s"
WRITE_STALL = "write_stall_timeout_s"
BUSY_WRITE_STALL = "busy_write_stall_timeout_s"
UNSENT = "max_unsent_bytes"
IDLE = "keep_alive_timeout_s"
MESSAGE_SIZE = "max_websocket_message_bytes"
INFLATION_RATIO = "max_websocket_inflation_ratio"
INFLATION_RATE = "max_websocket_inflation_per_s"
EVENT_LOOP_TURN = "event_loop_turn"
LINGER = "linger"
WEBSOCKET_OFFERS = "websocket_offers"
WEBSOCKET_SILENCE = "websocket_silence"
WEBSOCKET_PONGS = "websocket_pongs"
WEBSOCKET_CLOSE = "websocket_close"
WEBSOCKET_END = "websocket_end"
#: All limits.
LIMITS = (
    BODY_SIZE,
    BUFFERS,
    BODY_RATE,
    WRITE_STALL,
    BUSY_WRITE_STALL,
    UNSENT,
    IDLE,
    MESSAGE_SIZE,
    INFLATION_RATIO,
    INFLATION_RATE,
    EVENT_LOOP_TURN,
    LINGER,
    WEBSOCKET_OFFERS,
    WEBSOCKET_SILENCE,
    WEBSOCKET_PONGS,
    WEBSOCKET_CLOSE,
    WEBSOCKET_END,
)


#: Smaller messages have no maximum ratio. The ratio of deflate can reach about a thousand.
FREE_BYTES = 1 << 20
#: Number of bytes per received byte that do not count toward the rate: text grows by a factor of five to ten.
FREE_RATIO = 20

#: The time over which the rate is averaged.
BURST_S = 4.0


@dataclass(frozen=True, slots=True)
class InflationRules:
    """Limits of the decompression of a connection's messages.

    Attributes
    ----------
    max_ratio : float
        Maximum ratio of a message's size to its compressed size, if the message is larger than `FREE_BYTES`.
    bytes_per_s : float
        Maximum number of decompressed bytes per second, averaged over `BURST_S`, without `FREE_RATIO` bytes
        per received byte.
    max_message_bytes : float
        Maximum size of a message; a message may always be decompressed at once.
    """

    max_ratio: float = float("inf")
    bytes_per_s: float = float("inf")
    max_message_bytes: float = float("inf")

    @property
    def burst_bytes(self) -> float:
        """Maximum number of bytes that may be decompressed at once."""
        return max(BURST_S * self.bytes_per_s, self.max_message_bytes)


class Budget:
    """A shared budget of memory.

    Attributes
    ----------
    own_bytes : int
        The bytes that the server's thread uses. Only this thread changes the number, so it needs no lock.
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
        """The number of bytes that all threads use."""
        return self.own_bytes + self._other_bytes

    def acquire(self, size_bytes: int) -> bool:
        """Count bytes as used, whether or not they exceed the budget; return False if they do.

        Any thread may call this and `release`.
        """
        with self._lock:
            self._other_bytes += size_bytes
        return self.used_bytes <= self.size_bytes

    def release(self, size_bytes: int) -> None:
        """Count bytes as free again."""
        with self._lock:
            self._other_bytes -= size_bytes


class Limits:
    """The limits of one server, their usage, and how often each was hit.

    Without options, nothing is limited, and applications wait for their clients.

    Attributes
    ----------
    received : Budget
        The request bodies and WebSocket messages in memory.
    inflation : InflationRules
        The limits of the decompression of messages.
    loop_work : WorkByLoop
        Shares each event loop among connections with much to do.
    unsent : Budget
        The responses that wait for their clients, but hold no slot.
    trimmer : MemoryTrimmer
        Returns the memory of large bodies to the operating system.
    hits : Counter
        How many requests, WebSockets and connections have hit each limit; see `hit`.
    """

    def __init__(self, options: HTTPOptions | None = None) -> None:
        self.hits: Counter[str] = Counter(dict.fromkeys(LIMITS, 0))
        self._lock = threading.Lock()
        self.trimmer = MemoryTrimmer()
        self.min_body_bytes_per_s = 0
        self.body_grace_s = self.write_stall_timeout_s = self.busy_write_stall_timeout_s = float("inf")
        self.max_unsent_bytes = 0
        self.inflation = InflationRules()
        self.loop_work = WorkByLoop(lambda: self.hit(EVENT_LOOP_TURN))
        size_bytes, unsent_bytes = float("inf"), 0.0
        if options is not None:
            self.min_body_bytes_per_s = options.min_body_bytes_per_s
            self.body_grace_s = options.body_grace_s
            self.write_stall_timeout_s = options.write_stall_timeout_s
            self.busy_write_stall_timeout_s = options.busy_write_stall_timeout_s
            self.max_unsent_bytes = options.max_unsent_bytes
            self.inflation = InflationRules(
                options.max_websocket_inflation_ratio,
                options.max_websocket_inflation_per_s,
                options.max_websocket_message_bytes,
            )
            size_bytes = options.max_buffered_bytes or max(_BODIES * options.max_body_bytes, _LEAST_BYTES)
            unsent_bytes = size_bytes
        self.received = Budget(size_bytes)
        self.unsent = Budget(unsent_bytes)

    def hit(self, limit: str) -> None:
        """Count a request, a WebSocket or a connection that has hit a limit. Any thread may call this."""
        with self._lock:
            self.hits[limit] += 1
