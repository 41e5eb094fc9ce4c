"""The protocol between a replica and its user code, in this process or in a child process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from daskserve.common.types import ActorRequest, Envelope, RankInfo
from daskserve.data.replica.inspection import Inspection
from daskserve.data.replica.models import Models
from daskserve.data.replica.requests.slots import Slots
from daskserve.data.replica.user_code.construction import Stage
from daskserve.telemetry.table import MetricSample
from daskserve.telemetry.user import UserSample

if TYPE_CHECKING:  # a child process does not import this module
    from daskserve.cluster.worker.child import ChildProcess

#: How long user code may take to handle its cancellation, and how long its threads may take to end. The
#: destructor may take this long, or the rest of the grace period if that is longer.
CLOSE_GRACE_S = 1.0


class UserCode(Protocol):
    """The user code of one replica: in this process (`LocalCode`) or in a child process (`ChildCode`)."""

    slots: Slots
    #: The current stage of the start, and the time when its time limit began; 0 for the beginning of the
    #: stage.
    stage: Stage
    stage_since: float

    @property
    def models(self) -> Models:
        """The models that the code has loaded."""

    @property
    def inspection(self) -> Inspection:
        """Profiles and stacks of the code."""

    @property
    def loss(self) -> str:
        """Why the user code is lost; empty while it can serve."""

    @property
    def is_leaving(self) -> bool:
        """Whether the code's process has received SIGTERM, so that another replica has to replace it."""

    @property
    def abandoned(self) -> int:
        """How many cancelled runs have not ended."""

    @property
    def loop_blocks(self) -> int:
        """How many times user code has blocked its event loop."""

    @property
    def process(self) -> ChildProcess | None:
        """The child process; None if there is none, or it has not started."""

    async def start(self) -> Mapping[str, Any]:
        """Load, construct and probe the user code, and return facts about it; raise if that fails."""

    def handle(self, envelope: Envelope) -> ActorRequest:
        """Return a request that has not begun; raise `BadRequestError` if its kind is unknown."""

    async def reconfigure(
        self,
        user_config: bytes | None,
        concurrency: int,
        config: Mapping[str, Any],
        rank_info: RankInfo,
        patience_s: float,
    ) -> None:
        """Apply changed options, and the rank.

        The user's ``reconfigure`` runs once no requests run, or after ``patience_s``.
        """

    async def probe(self) -> None:
        """Return normally if user code can run and is healthy; raise otherwise."""

    async def statistics(self) -> dict[str, Any]:
        """Return the counts that only the user code has."""

    def metrics(self) -> dict[str, Any]:
        """Return the metrics that the controller reads every second for autoscaling."""

    def routing_stats(self) -> Mapping[str, Any]:
        """Return the last result of the user's ``record_routing_stats``."""

    def samples(self, own: list[MetricSample]) -> list[MetricSample]:
        """Return the replica's metrics; ``own`` contains those that the replica itself counts."""

    def user_samples(self) -> list[UserSample]:
        """Return the metrics of user code; see `daskserve.metrics`."""

    async def send_away(self) -> None:
        """Close the WebSockets with code 1001."""

    async def drain(self, grace_s: float) -> None:
        """Wait up to ``grace_s`` for the running requests; at this point, no new ones arrive."""

    async def destruct(self, grace_s: float, *, is_planned: bool) -> None:
        """Cancel running code, and destruct the user's object.

        ``is_planned`` is False if the code is stopped because it is unhealthy. The caller cancels this after
        ``grace_s``; a child process enforces the time itself.
        """

    async def close(self) -> None:
        """End all threads and processes."""
