"""The order of waiting requests, by priority and by deadline or arrival. Pure."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from daskserve.common.types import Envelope, EnvelopeKind
from daskserve.options.fields.priority import MAX_PRIORITY

T = TypeVar("T")


@dataclass(slots=True)
class Order:
    """How requests are ordered, as the controller publishes it.

    Attributes
    ----------
    header : str
        The header that has the priority of an HTTP request; empty for none.
    classes : mapping
        The numbers of priorities that have names.
    weights : mapping
        The share of each priority; empty if a higher one always goes first.
    by_deadline : bool
        Whether the earliest deadline goes first among requests of one priority.
    """

    header: str = ""
    classes: Mapping[str, int] = field(default_factory=dict)
    weights: Mapping[int, float] = field(default_factory=dict)
    by_deadline: bool = False

    def priority_of(self, envelope: Envelope) -> int:
        """Return the priority of a request; 0 if it has none or an invalid one."""
        if envelope.kind is not EnvelopeKind.HTTP:
            facts = envelope.head.get("facts")
            return self._read(facts["priority"]) if facts and "priority" in facts else 0
        if not self.header:
            return 0
        name = self.header.lower().encode()
        found = next((value for each, value in envelope.head.get("headers", ()) if each == name), None)
        return 0 if found is None else self._read(found.decode("latin-1").strip())

    def note_priority(self, envelope: Envelope) -> None:
        """Write the priority's number into a request, for the queues of its replica."""
        head = envelope.head
        if envelope.kind is EnvelopeKind.HTTP:
            ours = head.get("extensions", {}).get("daskserve")
            if ours is not None and "priority" not in ours and (priority := self.priority_of(envelope)):
                ours["priority"] = priority
            return
        facts = head.get("facts")
        if facts and type(facts.get("priority")) is str and "priority_number" not in facts:
            envelope.head = {**head, "facts": {**facts, "priority_number": self.priority_of(envelope)}}

    def _read(self, value: Any) -> int:
        if isinstance(value, str):
            if value in self.classes:
                return self.classes[value]
            value = int(value) if is_number(value) else 0
        return max(-MAX_PRIORITY, min(MAX_PRIORITY, value)) if isinstance(value, int) else 0


def is_number(text: str) -> bool:
    """Return whether a text is the number of a priority."""
    # int() would also accept spaces, underscores and any number of digits.
    return text.removeprefix("-").isdecimal() and len(text) <= 4


class RankedQueue(Generic[T]):
    """Items by priority, and by deadline or arrival within one priority.

    An item that is removed elsewhere stays here until its turn, and is skipped then.

    Parameters
    ----------
    is_there : callable
        Returns whether an item was not removed elsewhere.
    """

    def __init__(self, order: Order, is_there: Callable[[T], bool]) -> None:
        self._order = order
        self._is_there = is_there
        self._classes: dict[int, list[tuple[float, int, T]]] = {}
        self._numbers = itertools.count(1)
        #: How much of its share each priority has used.
        self._passed: dict[int, float] = {}
        self._now = 0.0

    def put(self, item: T, priority: int, deadline: float | None, *, is_first: bool = False) -> None:
        """Add an item; ``is_first`` puts it before the others of its priority."""
        number = next(self._numbers)
        key = 0.0 if not self._order.by_deadline else math.inf if deadline is None else deadline
        heap = self._classes.setdefault(priority, [])
        if not heap:
            # A priority that had no items until now must not catch up.
            self._passed[priority] = max(self._passed.get(priority, 0.0), self._now)
        heapq.heappush(heap, (-math.inf if is_first else key, -number if is_first else number, item))

    def pop(self) -> T | None:
        """Return the next item, and remove it; None if there is none."""
        while self._classes:
            priority = self._next_of(self._classes, self._passed)
            heap = self._classes[priority]
            item = heapq.heappop(heap)[2]
            if not heap:
                del self._classes[priority]
            if self._is_there(item):
                self.note_served(priority)
                return item
        return None

    def note_served(self, priority: int) -> None:
        """Count an item for the share of its priority."""
        if priority in self._passed:
            self._now = self._passed[priority]
            self._passed[priority] += self._cost(priority)

    def _cost(self, priority: int) -> float:
        return 1 / self._order.weights.get(priority, 1.0)

    def _next_of(self, priorities: Collection[int], passed: Mapping[int, float]) -> int:
        if not self._order.weights:
            return max(priorities)
        return min(priorities, key=lambda each: (passed[each], -each))

    def lowest_below(self, priority: int) -> T | None:
        """Return the item that would be served last, if its priority is below a limit; otherwise None."""
        while self._classes and (lowest := min(self._classes)) < priority:
            heap = self._classes[lowest]
            heap.sort()  # a sorted list is a heap, and sorting it again costs little
            while heap and not self._is_there(heap[-1][2]):
                del heap[-1]
            if heap:
                return heap[-1][2]
            del self._classes[lowest]
        return None

    def first(self) -> Iterator[T]:
        """Yield the items in the order of `pop` without removing them; add no items meanwhile."""
        passed, left = dict(self._passed), {}
        for priority, heap in self._classes.items():
            heap.sort()
            left[priority] = (item for _, _, item in heap if self._is_there(item))
        while left:
            priority = self._next_of(left, passed)
            item = next(left[priority], None)
            if item is None:
                del left[priority]
            else:
                passed[priority] += self._cost(priority)
                yield item

    def forget_gone(self, left: int) -> None:
        """Drop the items that were removed elsewhere if they outnumber the ``left`` ones."""
        if sum(map(len, self._classes.values())) <= 2 * left + 64:
            return
        for priority, heap in list(self._classes.items()):
            self._classes[priority] = [each for each in heap if self._is_there(each[2])]
            heapq.heapify(self._classes[priority])
            if not self._classes[priority]:
                del self._classes[priority]
