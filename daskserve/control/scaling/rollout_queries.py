"""Compares the values of PromQL expressions for both versions of a rollout, for its gates."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable

from daskserve.common import settings
from daskserve.common.clock import Clock
from daskserve.common.types import BackendTag
from daskserve.control.observed.observed import Observed
from daskserve.control.records.records import BackendRecord, ReplicaRecord
from daskserve.control.records.state import State
from daskserve.control.records.two_versions import running_of, split_of
from daskserve.control.scaling.fetching import HTTPFetcher
from daskserve.control.scaling.prometheus import Fetch, PrometheusQueries
from daskserve.options.rollout import Gate

logger = logging.getLogger("daskserve.controller")

#: Interval of the checks which comparisons are due.
CHECK_S = 1.0


class RolloutQueries:
    """Polls while rollouts with such gates go on; each comparison adds to their evidence."""

    def __init__(self, state: State, observed: Observed, clock: Clock, fetch: Fetch | None = None) -> None:
        self._state = state
        self._observed = observed
        self._clock = clock
        self._fetch = fetch
        #: When each gate is compared next, by backend, key of the step and number.
        self._due: dict[tuple[BackendTag, str, int], float] = {}

    async def run(self) -> None:
        """Poll until cancelled."""
        fetcher = None
        if self._fetch is None:
            fetcher = HTTPFetcher()
            self._fetch = fetcher
        try:
            while True:
                await self._clock.sleep(CHECK_S)
                try:
                    await self.compare()
                except Exception:
                    logger.exception("The comparisons of rollouts failed and are retried")
        finally:
            if fetcher is not None:
                fetcher.close()

    async def compare(self) -> None:
        """Make all comparisons that are due."""
        due: dict[tuple[BackendTag, str, int], float] = {}
        asking = []
        now = self._clock.now()
        # An instance without rollouts has no index of them: this takes some 0.03 ms for 1,000 backends.
        for backend in [each for each in self._state.backends.values() if each.rollout is not None]:
            tag = backend.tag
            plan = backend.config.rollout
            new, old = running_of(backend, self._state.replicas_of(tag))
            split = split_of(backend, new, old)
            if plan is None or backend.canary is None or not 0 < split.share < 1:
                continue
            for number, gate in enumerate(plan.gates):
                if gate.metric != "prometheus":
                    continue
                place = (tag, split.key, number)
                # The first comparison is of requests of this step alone.
                at = self._due.get(place, now + gate.interval_s)
                if now >= at:
                    at = now + gate.interval_s
                    asking.append(self._ask(backend, gate, place, new, old))
                due[place] = at
        self._due = due
        await asyncio.gather(*asking)

    async def _ask(
        self,
        backend: BackendRecord,
        gate: Gate,
        place: tuple[BackendTag, str, int],
        new: Iterable[ReplicaRecord],
        old: Iterable[ReplicaRecord],
    ) -> None:
        assert self._fetch is not None
        assert gate.prometheus_address is not None
        names = ("", "") if backend.canary is None else backend.canary.names
        queries = PrometheusQueries(
            gate.prometheus_address,
            {"new": filled(gate.query, names[0], new), "old": filled(gate.query, names[1], old)},
            fetch=self._fetch,
            clock=self._clock,
            variables=settings.process_variables(),
        )
        await queries.refresh()
        values = queries.values()
        if values.keys() == {"new", "old"}:
            after, before = values["new"], values["old"]
            worse = after > before * (1 + gate.tolerance)
            self._observed.rollouts.polled(*place, after, before, worse=worse)


def filled(query: str, version: str, replicas: Iterable[ReplicaRecord]) -> str:
    """Return an expression for the replicas of one version."""
    pattern = "|".join(re.escape(each.tag) for each in replicas).replace("\\", r"\\")
    return query.replace("$replicas", pattern).replace("$version", version)
