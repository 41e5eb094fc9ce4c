"""The metrics of a child process, which its actor reads and publishes.

A child has no scrape endpoint of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from daskserve.common.clock import Clock
from daskserve.errors import ActorLostError
from daskserve.telemetry.collector import PROCESS, plain_sample, sample_of
from daskserve.telemetry.error_log import ErrorLog
from daskserve.telemetry.table import MetricSample
from daskserve.telemetry.user import UserSample

logger = logging.getLogger("daskserve.replica")

#: The interval at which an actor reads the metrics of its child.
METRICS_S = 1.0
#: The metrics that the actor itself counts.
ACTORS_OWN = frozenset(
    {
        "deployment_health_check_failures",
        "deployment_health_check_seconds",
        "deployment_reconfigure_seconds",
        "deployment_replica_shutdown_seconds",
        "deployment_replica_start_failures",
        "deployment_replica_starts",
        "deployment_replica_startup_seconds",
        "replica_healthy",
        "replica_max_ongoing_requests",
        "replica_ongoing_requests",
        "replica_start_time_seconds",
        "replica_startup_duration_seconds",
    }
)


def child_metrics(samples: Iterable[MetricSample], user_samples: Iterable[UserSample]) -> dict[str, Any]:
    """Return the metrics of a child's replica and of its process, in plain values."""
    PROCESS.is_reported = True
    return {
        "samples": [plain_sample(each) for each in (*samples, *PROCESS.samples())],
        "user_samples": [each.plain() for each in (*user_samples, *PROCESS.user.samples())],
    }


async def poll_metrics(ask: Callable[[], Awaitable[object]], replica_tag: str, clock: Clock) -> None:
    """Read the metrics of a child every second until it ends.

    A scrape does not wait for the child: it returns the values that were read last.
    """
    error_log = ErrorLog(logger)
    while True:
        await clock.sleep(METRICS_S)
        try:
            await clock.wait_for(ask(), METRICS_S)
        except ActorLostError:
            return
        except TimeoutError:
            pass  # the child is busy; the health probe decides whether that is a failure
        except Exception as error:
            error_log.log(error, "The metrics of the process of %s could not be read", replica_tag)


@dataclass(frozen=True, slots=True)
class ReportedMetrics:
    """The metrics that a child reported, in plain values."""

    plain_samples: Sequence[Any] = ()
    plain_user_samples: Sequence[Any] = ()
    latency_counts: Sequence[int] = ()
    failed: int = 0
    queued: int = 0
    continuous: Mapping[str, Any] | None = None
    #: The number of requests from the child's own listeners that run, and that have ended.
    direct: Sequence[int] = (0, 0)

    def brief(self, ongoing: int, waiting: int, handled: int) -> dict[str, Any]:
        """Return the metrics that the controller reads for autoscaling."""
        direct, ended = self.direct
        return {
            "ongoing": ongoing + direct,
            "queued": waiting + self.queued,
            "ended": handled - ongoing + ended,
            "failed": self.failed,
            "latency_counts": list(self.latency_counts),
            **({} if self.continuous is None else {"continuous": self.continuous}),
        }

    def samples(self) -> list[MetricSample]:
        """Return the child's metrics, except for those that its actor counts."""
        return [sample_of(plain) for plain in self.plain_samples if plain[0] not in ACTORS_OWN]

    def user_samples(self) -> list[UserSample]:
        """Return the metrics of user code in the child."""
        return [UserSample.from_plain(plain) for plain in self.plain_user_samples]
