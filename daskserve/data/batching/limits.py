"""The limits of batches, which a queue follows and a tuner may change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class BatchLimits:
    """The limits of batches. They may change at any time, and several queues may share them."""

    #: Maximum batch size; a full batch runs at once.
    max_batch_size: int
    #: Maximum time that the first item of a batch waits for others, in seconds.
    wait_s: float
    #: Preferred sizes in ascending order: a batch runs at once with the largest one that the queue can fill.
    preferred: Sequence[int] = ()
    #: A smaller size at which a batch also runs at once; 0 if only a full batch does.
    enough: int = 0
    #: Whether `wait_s` restarts when a batch ends, because its callers may send their next items.
    restarts_wait: bool = False

    def take(self, queued: int) -> tuple[int, bool]:
        """Return how many of the queued items make a batch, and whether it runs at once."""
        count = min(queued, self.max_batch_size)
        for size in reversed(self.preferred):
            if size <= count:
                return size, True
        return count, queued >= (self.enough or self.max_batch_size)
