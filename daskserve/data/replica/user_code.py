"""What a replica asks of its user code, wherever that runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from daskserve.data.replica.answer import Answer
from daskserve.data.replica.slots import Slots
from daskserve.figures.table import MetricSample
from daskserve.figures.user import UserSample
from daskserve.types import Envelope

#: What user code gets to react to being cancelled, and again for its destructor and its threads' ends.
CLOSE_GRACE_S = 1.0


class UserCode(Protocol):
    """The user code of one replica: in this process (`LocalCode`) or in a child process (`ChildCode`)."""

    slots: Slots

    @property
    def loss(self) -> str:
        """Why it cannot serve any more, if it was lost; else empty."""

    @property
    def abandoned(self) -> int:
        """How many runs were given up but go on."""

    @property
    def loop_blocks(self) -> int:
        """How many times it was seen blocking its event loop."""

    async def start(self) -> Mapping[str, Any]:
        """Load, construct and check it, and return facts about it; raise if that fails."""

    def answer(self, envelope: Envelope) -> Answer:
        """Return the answer to a request, not begun; raise `BadRequestError` for one of an unknown kind."""

    def needs_task(self, envelope: Envelope) -> bool:
        """Whether a request can only be answered from a task."""

    async def reconfigure(
        self,
        user_config: bytes | None,
        concurrency: int,
        config: Mapping[str, Any],
    ) -> None:
        """Take over changed options."""

    async def probe(self) -> None:
        """Return if it can run and does not object."""

    async def statistics(self) -> dict[str, Any]:
        """Return what only it knows of the replica's figures."""

    def figures(self) -> dict[str, Any]:
        """Return what autoscaling asks for every second."""

    def samples(self, own: list[MetricSample]) -> list[MetricSample]:
        """Return the replica's figures as metrics, given those that the replica has itself."""

    def user_samples(self) -> list[UserSample]:
        """Return the metrics of user code; see `daskserve.metrics`."""

    async def send_away(self) -> None:
        """Close the WebSockets, which would never end by themselves, with code 1001."""

    async def drain(self, grace_s: float) -> None:
        """Let the running requests finish for up to ``grace_s``; no more will come."""

    async def close(self) -> None:
        """Cancel what still runs, destruct the user's object, and leave nothing behind."""
