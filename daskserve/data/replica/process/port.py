"""A port of a proxy: the connections that children serve, and the metrics of the children's listeners."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from itertools import zip_longest
from typing import Any

from daskserve.data.replica.process.given_connections import GivenConnections
from daskserve.loops.connection_table import LostAttempt, MovedConnection
from daskserve.telemetry.collector import FoldedTotals, sample_of
from daskserve.telemetry.histogram import HistogramCounts
from daskserve.telemetry.table import MetricSample


class Port:
    """The connections of a proxy that children may serve, and the metrics of the children's listeners.

    Parameters
    ----------
    name : str
        The name of the proxy.
    start : bytes
        The encoded `daskserve.options.start_messages.ProxyStart` of a child's listener.
    max_connections : int
        Maximum number of connections of each child.
    serve : callable
        Serves a connection at the proxy.
    is_only : bool
        Whether the instance has no other proxy.
    """

    def __init__(
        self,
        name: str,
        start: bytes,
        max_connections: int,
        serve: Callable[[MovedConnection], object],
        *,
        is_only: bool = False,
    ) -> None:
        self.name, self.start = name, start
        self.is_only = is_only
        #: Called with whether a child gets connections, when that may have changed.
        self.on_offer: Callable[[bool], object] = bool
        #: The endpoints of all routes.
        self.endpoints: frozenset[str] = frozenset()
        self._max_connections, self._serve = max_connections, serve
        #: The connections of the children that get more.
        self._offered: list[GivenConnections] = []
        #: The connections of all children.
        self._all: set[GivenConnections] = set()
        self._reported: dict[str, list[MetricSample]] = {}
        #: The totals of listeners that have ended.
        self._ended = FoldedTotals()

    # ---- connections

    def connections(self) -> GivenConnections:
        """Return an object for the connections of another child."""
        found = GivenConnections(self._max_connections, lambda moved: self._continue(moved, found.own))
        self._all.add(found)
        return found

    def offer(self, to: GivenConnections, own: frozenset[str]) -> None:
        """Give connections to a child from now on, which answers requests of its ``own`` endpoints."""
        to.open()
        to.own = own
        if to in self._offered:
            return
        self._offered.append(to)
        self.on_offer(True)
        alike = [each for each in self._offered if each.own == own]
        share = -(-sum(map(len, alike)) // len(alike))
        for each in alike:
            if len(each) > share:
                each.ask_back(len(each) - share)

    def withdraw(self, found: GivenConnections) -> None:
        """Give a child no more connections, and continue elsewhere with those that it has not taken."""
        if found in self._offered:
            self._offered.remove(found)
            self.on_offer(bool(self._offered))
            found.withdraw()

    def drop(self, found: GivenConnections, lost: LostAttempt | None = None) -> None:
        """Close the connections of a child; continue with them elsewhere if the child's process is lost."""
        self.withdraw(found)
        if lost is not None:
            found.recover(lost)
        else:
            found.close()
        self._all.discard(found)

    def taker_of(self, endpoint: str | None) -> Callable[[MovedConnection], bool] | None:
        """Return the function that gives a connection to the child with the fewest; None if there is none.

        Parameters
        ----------
        endpoint : str or None
            The endpoint of its last request. A new connection, which has none, is given only to a child that
            answers all endpoints.
        """
        return self._taker_of(self.endpoints if endpoint is None else {endpoint})

    def _taker_of(self, wanted: Set[str]) -> Callable[[MovedConnection], bool] | None:
        found = [each for each in self._offered if each.has_room and each.own >= wanted]
        return min(found, key=len).give if found else None

    def _continue(self, moved: MovedConnection, own: frozenset[str]) -> None:
        give = None if moved.received or moved.stays else self._taker_of(own)
        if give is None or not give(moved):
            self._serve(moved)

    def given(self) -> int:
        """Return how many connections the children have."""
        return sum(map(len, self._all))

    def evict(self) -> None:
        """Let the child with the most connections close the one that has been idle longest."""
        if self._all:
            max(self._all, key=len).evict()

    # ---- metrics

    def report(self, key: str, samples: Iterable[Any]) -> None:
        """Record the metrics of a child's listener, in plain values."""
        self._reported[key] = [sample_of(each) for each in samples]

    def fold(self, key: str) -> None:
        """Keep the totals of a listener that has ended."""
        self._ended.add(self._reported.pop(key, ()), self._present)

    def _present(self) -> list[MetricSample]:
        return [sample for each in list(self._reported.values()) for sample in each]

    def samples(self) -> list[MetricSample]:
        """Return the metrics of the listeners of all children, as last read."""
        return [*self._ended.samples(), *self._present()]


def with_children(own: Mapping[str, Any], samples: Iterable[MetricSample]) -> dict[str, Any]:
    """Return the counts of a proxy plus those of its children's listeners, from their metrics."""
    more = totals_of(samples)
    return {key: _added(value, more[key]) if key in more else value for key, value in own.items()}


def _added(own: Any, more: Any) -> Any:
    if isinstance(own, Mapping):
        return {
            **more,
            **{key: _added(each, more[key]) if key in more else each for key, each in own.items()},
        }
    if isinstance(own, list):
        return [sum(each) for each in zip_longest(own, more, fillvalue=0)]
    return own + more


def totals_of(samples: Iterable[MetricSample]) -> dict[str, Any]:
    """Return the counts of running and ended requests of listeners, from their metrics."""
    responses: Counter[str] = Counter()
    endpoints: dict[str, list[int]] = {}
    ended = failed = ongoing = 0
    latency: HistogramCounts | None = None
    for name, labels, value in samples:
        if name == "http_request_duration_seconds":
            assert isinstance(value, HistogramCounts)
            if latency is None:
                latency = value.copy()
            else:
                latency.add(value.counts, value.sum)
        elif name == "http_ongoing_requests":
            ongoing += int(value)  # type: ignore[arg-type]
        elif name == "http_requests":
            assert not isinstance(value, HistogramCounts)
            endpoint, status, count = labels[2], labels[4], int(value)
            responses[f"{status[0]}xx"] += count
            ended += count
            failed += count if status >= "500" else 0
            if endpoint:
                known = endpoints.setdefault(endpoint, [0, 0])
                known[0] += count
                known[1] += count if status >= "500" else 0
    return {
        "ongoing": ongoing,
        "responses": dict(responses),
        "ended": ended,
        "failed": failed,
        "endpoints": endpoints,
        "handled_total": 0 if latency is None else sum(latency.counts),
        "latency_counts": [] if latency is None else list(latency.counts),
        "latency_sum_s": 0.0 if latency is None else latency.sum,
    }
