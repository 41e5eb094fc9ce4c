"""Compares the values of PromQL expressions for both versions of a rollout, for its gates."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from daskserve.common import settings
from daskserve.common.clock import Clock
from daskserve.common.types import BackendTag
from daskserve.control.observed.observed import Observed
from daskserve.control.records.model_decisions import key_of, rollouts_of, share_of
from daskserve.control.records.models import rollout_tag
from daskserve.control.records.records import ReplicaRecord
from daskserve.control.records.state import State
from daskserve.control.records.version_split import running_of, split_of
from daskserve.control.scaling.fetching import HTTPFetcher
from daskserve.control.scaling.prometheus import Fetch, PrometheusQueries
from daskserve.options.rollout import Gate, RolloutConfig

logger = logging.getLogger("daskserve.controller")

#: Interval at which to check which comparisons are due.
CHECK_S = 1.0

#: A backend, the key of a step and the number of a gate.
_Place: TypeAlias = tuple[BackendTag, str, int]


class _Subject(NamedTuple):
    """A rollout whose versions are compared; in pairs, the new version comes first."""

    tag: BackendTag
    key: str
    plan: RolloutConfig
    names: tuple[str, str]
    replicas: tuple[Sequence[ReplicaRecord], Sequence[ReplicaRecord]]


class RolloutQueries:
    """Polls while rollouts with such gates are active; each comparison adds to their evidence."""

    def __init__(self, state: State, observed: Observed, clock: Clock, fetch: Fetch | None = None) -> None:
        self._state = state
        self._observed = observed
        self._clock = clock
        self._fetch = fetch
        #: The time of the next comparison of each gate.
        self._due: dict[_Place, float] = {}
        #: The queries of each gate, kept so that a lasting error is logged once.
        self._queries: dict[_Place, PrometheusQueries] = {}

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
        due: dict[_Place, float] = {}
        asking = []
        now = self._clock.now()
        for found in self._subjects():
            for number, gate in enumerate(found.plan.gates):
                if gate.metric != "prometheus":
                    continue
                place = (found.tag, found.key, number)
                # Wait for the first comparison, so that it covers only requests of this step.
                at = self._due.get(place, now + gate.interval_s)
                if now >= at:
                    at = now + gate.interval_s
                    asking.append(self._ask(found, gate, place))
                due[place] = at
        self._due = due
        self._queries = {place: found for place, found in self._queries.items() if place in due}
        await asyncio.gather(*asking)

    def _subjects(self) -> Iterator[_Subject]:
        """Yield the rollouts with traffic for both versions, of deployments and of models."""
        # Rollouts have no index: this loop takes some 0.03 ms for 1,000 backends.
        for backend in [each for each in self._state.backends.values() if each.canary is not None]:
            plan, rollout = backend.config.rollout, backend.canary
            new, old = running_of(backend, self._state.replicas_of(backend.tag))
            split = split_of(backend, new, old)
            if plan is not None and rollout is not None and 0 < split.share < 1:
                yield _Subject(backend.tag, split.key, plan, rollout.names, (new, old))
        for tag, record in [each for each in self._state.models.items() if each[1].rollouts]:
            owner = self._state.backends.get(tag)
            repository = None if owner is None else owner.config.model_repository
            if repository is None or repository.rollout is None:
                continue
            replicas = self._state.running(tag)
            for name, rollout in rollouts_of(record).items():
                share = share_of(rollout, repository.rollout)
                if 0 < share < 1:
                    names, key = rollout.names, key_of(rollout, share)
                    subject = rollout_tag(tag, name)
                    yield _Subject(subject, key, repository.rollout, names, (replicas, replicas))

    async def _ask(self, found: _Subject, gate: Gate, place: _Place) -> None:
        new, old = (
            filled(gate.query, name, replicas)
            for name, replicas in zip(found.names, found.replicas, strict=True)
        )
        queries = self._queries.get(place)
        if queries is None:
            queries = self._queries[place] = self._asker(gate)
        queries.queries = {"new": new, "old": old}
        await queries.refresh()
        values, errors = queries.values(), queries.errors()
        for name, whose in (("new", found.names[0]), ("old", found.names[1])):
            if name in errors:
                self._observed.rollouts.troubled(*place, f"for version '{whose}', {errors[name]}")
                return
        if values.keys() == {"new", "old"}:
            after, before = values["new"], values["old"]
            worse = after > before * (1 + gate.tolerance)
            self._observed.rollouts.polled(*place, after, before, worse=worse)

    def _asker(self, gate: Gate) -> PrometheusQueries:
        assert self._fetch is not None
        assert gate.prometheus_address is not None
        return PrometheusQueries(
            gate.prometheus_address,
            {},
            fetch=self._fetch,
            clock=self._clock,
            variables=settings.process_variables(),
        )


def filled(query: str, version: str, replicas: Iterable[ReplicaRecord]) -> str:
    """Return an expression for the replicas of one version."""
    pattern = "|".join(re.escape(each.tag) for each in replicas).replace("\\", r"\\")
    return query.replace("$replicas", pattern).replace("$version", version)
