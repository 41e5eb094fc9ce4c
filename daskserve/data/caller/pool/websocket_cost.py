"""Mean CPU time per WebSocket message, used to decide whether to prefer a local replica.

A WebSocket stays at its replica for as long as it is open, and holds a slot. The work depends on its
messages: a chat sends one message a minute, whereas a model may compute for each message. A *turn* is the
time from when user code receives a message until it waits for the next.
"""

from __future__ import annotations

import math

#: Minimum time over which the busy share is averaged.
WINDOW_S = 1.0
#: The weight of the newest turn in the mean of all turns, once there are many.
TURN_WEIGHT = 0.02
#: Longer turns count as this long in the mean, because a busy machine interrupts some turns.
MAX_TURN_S = 0.004


class WebSocketCost:
    """The mean CPU time per message of the WebSockets at this process's own replicas of one backend."""

    __slots__ = ("_busy_before_s", "_busy_s", "_count", "_share", "_since", "_turn_s")

    def __init__(self) -> None:
        self._count = 0
        self._turn_s = 0.0
        self._busy_s = self._busy_before_s = self._share = 0.0
        self._since = -math.inf

    def note(self, turn_s: float) -> None:
        """Count a turn; called from the threads of user code. Losing a count does no harm."""
        self._busy_s += turn_s
        self._count += 1
        counted_s = min(turn_s, MAX_TURN_S)
        self._turn_s += max(TURN_WEIGHT, 1 / self._count) * (counted_s - self._turn_s)

    def is_light(self, now: float, hop_s: float) -> bool:
        """Whether a hop costs more than the turns; False before the first turn.

        ``hop_s`` is the cost of a hop. The busier the process is with turns, the smaller a turn must be,
        because messages then wait for each other.
        """
        elapsed_s = now - self._since
        if elapsed_s >= WINDOW_S:
            self._share = min(1.0, (self._busy_s - self._busy_before_s) / elapsed_s)
            self._since = now
            self._busy_before_s = self._busy_s
        return self._count > 0 and self._turn_s <= hop_s * (1.0 - self._share)
