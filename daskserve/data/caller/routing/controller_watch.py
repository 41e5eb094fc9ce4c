"""Fails requests without a replica while no controller answers.

Requests without a replica wait until the controller starts one. If all workers have left, there is no
controller, and the requests would wait for ever. So after `CONTROLLER_S` without an answer from a controller,
they fail, and so do new requests, until a controller answers again. Requests to running replicas need no
controller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from daskserve.cluster.protocols.base import Listener
from daskserve.common.clock import Clock
from daskserve.common.formatting import shown
from daskserve.errors import UnavailableError
from daskserve.loops.alarm import Alarm

#: How long a controller may be silent; changes are retried for the same time while it is replaced.
CONTROLLER_S = 30.0
#: Interval at which a process with such requests checks that the controller answers.
CHECK_S = 2.0


class ControllerWatch:
    """Fails the waiting requests of one process to one instance while no controller answers.

    Parameters
    ----------
    starving : callable
        Returns, for each backend whose requests wait although it has no replicas, a function that fails them.
    """

    def __init__(
        self, listener: Listener, clock: Clock, starving: Callable[[], Sequence[Callable[[], None]]]
    ) -> None:
        self._listener = listener
        self._clock = clock
        self._starving = starving
        self._alarm = Alarm(self._check)

    @property
    def is_lost(self) -> bool:
        """Whether requests without a replica fail."""
        since = self._listener.silent_since
        return since is not None and self._clock.now() - since >= CONTROLLER_S

    def watch(self) -> None:
        """Watch the requests that wait without a replica; idempotent."""
        self._alarm.set(self._clock.now() + CHECK_S)

    def error(self, name: str) -> UnavailableError:
        """Return the error of a request while `is_lost`; the ``name`` of its target begins the text."""
        since = self._listener.silent_since
        silent_s = 0.0 if since is None else self._clock.now() - since
        return UnavailableError(
            f"{name} has no replica, and no controller has answered for "
            f"{shown(round(silent_s))} s: its Dask cluster has no worker, or none that can start one. The "
            "logs of the workers, or of the program that started the cluster, say why.",
            is_public=True,
        )

    def close(self) -> None:
        """Stop watching."""
        self._alarm.cancel()

    def _check(self) -> None:
        starving = self._starving()
        if not starving:
            return
        if self.is_lost:
            for each in starving:
                each()
        self._listener.ask()
        self.watch()
