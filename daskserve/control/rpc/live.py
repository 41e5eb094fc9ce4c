"""The verb for live metrics."""

from __future__ import annotations

from typing import Any

from daskserve.cluster.protocols.base import verb
from daskserve.control.core import MAX_WAIT_S, ControllerCore
from daskserve.control.views.live import is_measured, live_metrics
from daskserve.telemetry.live import LIVE_METRICS

#: Lifetime of an answer, which several clients may share.
KEPT_S = 0.4
#: Interval of the checks whether the first rates are known.
POLL_S = 0.2


class LiveVerbs:
    """The verb for live metrics."""

    def __init__(self, core: ControllerCore) -> None:
        self._core = core
        self._made_at = float("-inf")
        self._made: dict[str, Any] = {}

    @verb
    async def live_metrics(self, wait_s: float = 0.0) -> dict[str, Any]:
        """Return the rates, latencies and queues of the last second.

        For some seconds after each call, the counts of replicas, proxies and routers are collected.

        Parameters
        ----------
        wait_s : float
            How long to wait, at most 30 s, until each replica and proxy is measured.
        """
        core, clock = self._core, self._core.clock
        self._watch()
        deadline = clock.now() + min(wait_s, MAX_WAIT_S)
        oldest = clock.now() - KEPT_S
        while clock.now() < deadline and not is_measured(core.state, core.observed, clock.now()):
            await clock.sleep(POLL_S)
            self._watch()
            oldest = clock.now()
        if self._made_at <= oldest:
            self._made = live_metrics(core.state, core.observed, clock.now(), clock.wall())
            self._made_at = clock.now()
        return self._made

    def _watch(self) -> None:
        self._core.observed.live.check(self._core.clock.now())
        self._core.long_poll.notify({LIVE_METRICS: True})  # `WorkerWatch` removes the value later
