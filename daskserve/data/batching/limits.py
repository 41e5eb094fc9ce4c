"""The limits of a batch, for the queue that obeys them and the tuner that sets them."""

from __future__ import annotations


class BatchLimits:
    """The limits of a batch. They may change at any time, and several queues may share them."""

    __slots__ = ("enough", "max_batch_size", "wait_s", "waits_anew")

    def __init__(self, max_batch_size: int, wait_s: float) -> None:
        #: Maximum batch size; a full batch runs at once.
        self.max_batch_size = max_batch_size
        #: A batch of this size runs at once, too; 0: only a full one does.
        self.enough = 0
        #: Maximum time that the first item of a batch waits for others, in seconds.
        self.wait_s = wait_s
        #: Whether this time begins again when a batch ends, whose callers may send their next items then.
        self.waits_anew = False
