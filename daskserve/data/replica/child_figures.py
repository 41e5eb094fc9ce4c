"""The metrics of a child process, which has no scrape endpoint: it reports them to its actor."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from daskserve.clock import Clock
from daskserve.errors import ActorLostError
from daskserve.figures.collector import PROCESS, plain_sample, sample_of
from daskserve.figures.error_log import ErrorLog
from daskserve.figures.table import MetricSample
from daskserve.figures.user import UserSample

logger = logging.getLogger("daskserve.replica")

#: How often a child is asked for its figures.
FIGURES_S = 1.0
#: The metrics that the actor of a child counts.
ACTORS_OWN = frozenset(
    {
        "deployment_health_check_failures",
        "deployment_replica_start_failures",
        "deployment_replica_starts",
        "replica_healthy",
        "replica_max_ongoing_requests",
        "replica_ongoing_requests",
        "replica_start_time_seconds",
        "replica_startup_duration_seconds",
    }
)


def tell(samples: Iterable[MetricSample], user_samples: Iterable[UserSample]) -> dict[str, Any]:
    """Return the figures of a child's replica, and all else that its process counts, in plain values."""
    return {
        "samples": [plain_sample(each) for each in (*samples, *PROCESS.samples())],
        "user_samples": [each.plain() for each in (*user_samples, *PROCESS.user.samples())],
    }


async def keep_asking_for_figures(
    ask: Callable[[], Awaitable[object]], replica_tag: str, clock: Clock
) -> None:
    """Have a child tell its figures every second until it is gone.

    So a scrape, which must not wait for the child, finds figures that are hardly older.
    """
    error_log = ErrorLog(logger)
    while True:
        await clock.sleep(FIGURES_S)
        try:
            await clock.wait_for(ask(), FIGURES_S)
        except ActorLostError:
            return
        except TimeoutError:
            pass  # it is busy; its health is somebody else's matter
        except Exception as error:
            error_log.log(error, "The figures of the process of %s could not be had", replica_tag)


class ToldFigures:
    """What a child said of its figures, in plain values."""

    __slots__ = ("_latency_counts", "_samples", "_user_samples")

    def __init__(
        self,
        samples: Sequence[Any] = (),
        user_samples: Sequence[Any] = (),
        latency_counts: Sequence[int] = (),
    ) -> None:
        self._samples = samples
        self._user_samples = user_samples
        self._latency_counts = latency_counts

    def brief(self, ongoing: int, handled: int) -> dict[str, Any]:
        """Return how many requests run, how many have ended, and how soon the child says that they did."""
        return {
            "ongoing": ongoing,
            "ended": handled - ongoing,
            "latency_counts": list(self._latency_counts),
        }

    def samples(self) -> list[MetricSample]:
        """Return its metrics but those that its actor knows better."""
        return [sample_of(plain) for plain in self._samples if plain[0] not in ACTORS_OWN]

    def user_samples(self) -> list[UserSample]:
        """Return what user code measures there."""
        return [UserSample.from_plain(plain) for plain in self._user_samples]
