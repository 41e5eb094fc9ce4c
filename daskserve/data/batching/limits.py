"""The limits of batches, which a queue follows and a tuner may change."""

from __future__ import annotations

from collections.abc import Sequence


class BatchLimits:
    """The limits of batches. They may change at any time, and several queues may share them."""

    __slots__ = ("enough", "max_batch_size", "preferred", "wait_s", "waits_anew")

    def __init__(self, max_batch_size: int, wait_s: float, preferred: Sequence[int] = ()) -> None:
        #: Maximum batch size; a full batch runs at once.
        self.max_batch_size = max_batch_size
        #: A smaller size at which a batch runs at once, too; 0 if only a full batch does.
        self.enough = 0
        #: Maximum time that the first item of a batch waits for others, in seconds.
        self.wait_s = wait_s
        #: Whether this time begins again when a batch ends, because its callers may send their next items.
        self.waits_anew = False
        #: Preferred sizes in ascending order: a batch runs at once with the largest that the queue can fill.
        self.preferred = preferred

    def take(self, queued: int) -> tuple[int, bool]:
        """Return how many of the queued items make a batch, and whether it runs at once."""
        count = min(queued, self.max_batch_size)
        for size in reversed(self.preferred):
            if size <= count:
                return size, True
        return count, queued >= (self.enough or self.max_batch_size)
