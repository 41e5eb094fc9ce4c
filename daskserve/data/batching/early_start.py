"""Decides whether a batch of a replica should wait for more calls, and whether its waits help.

A batch waits for more calls. But the calls of a replica come from a limited number of clients, each of which
waits for its answer. Once all of them are in the queue, the rest of the wait only delays them. So a batch
starts at once if no other batch runs and one of these conditions is true:

1. The queue holds as many calls as the replica has slots.
2. The queue holds all requests that run in the replica, and no recent batch ended with more calls in the
   queue and in batches. The first batch always waits.

Without the second half of condition 2, the first of 16 clients to get its answer would run alone, and then
the others without it. If the model takes as long for one call as for 16, this halves the throughput.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

from daskserve.common.formatting import shown

logger = logging.getLogger("daskserve.replica")

#: How many batches are remembered. After a client has disconnected, this many batches wait although no call
#: arrives.
REMEMBERED = 16
#: Number of consecutive waits without a new call after which a warning is logged.
VAIN = 500
#: A call that arrives in this first share of a wait counts as simultaneous with the first call.
TOGETHER = 0.1


class EarlyStart:
    """Decides whether batches of one queue start early, given the number of calls at the end of recent ones.

    Parameters
    ----------
    slots : callable
        Returns how many slots of the replica are taken, and how many it has.
    name : str
        The function and its replica, for the log.
    """

    def __init__(self, slots: Callable[[], tuple[int, int]], name: str) -> None:
        self._slots = slots
        self._name = name
        self._recent: deque[int] = deque(maxlen=REMEMBERED)
        self._most = 0
        #: The number of calls in each wait since the last wait that helped; None once the warning is logged.
        self._vain: list[int] | None = []

    def has_all(self, queued: int) -> bool:
        """Return whether the queue holds all calls that can be expected while no batch runs."""
        taken, slots = self._slots()
        if queued >= slots:
            return True
        return bool(self._most) and queued >= self._most and queued >= taken

    def ended(self, current: int) -> None:
        """Record that a batch has ended; ``current`` counts the queued calls and those in running batches."""
        self._recent.append(current)
        self._most = max(self._recent)

    def waited(self, waits_s: Sequence[float], wait_s: float, limit: int) -> None:
        """Record that a batch starts because the wait of its first call is over.

        Parameters
        ----------
        waits_s : sequence of float
            How long each of its calls has waited.
        wait_s : float
            Maximum wait of the first call.
        limit : int
            The size of a full batch; 0 if it is not a number of calls.
        """
        if self._vain is None or not wait_s:
            return
        if min(waits_s) < max(waits_s) - TOGETHER * wait_s:
            self._vain.clear()
            return
        self._vain.append(len(waits_s))
        if len(self._vain) >= VAIN:
            logger.warning(
                "The wait of %s s of %s brought no further call to any of the last %d batches that waited. "
                "They had %s of %s calls on average. Lower the wait, or set max_batch_size to this average.",
                shown(wait_s),
                self._name,
                VAIN,
                shown(sum(self._vain) / VAIN),
                limit or "any number of",
            )
            self._vain = None
