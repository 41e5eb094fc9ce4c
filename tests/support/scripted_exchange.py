"""A request in a state that a test sets, for the watches of connections."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class ScriptedExchange:
    """An `OngoingRequest` of `daskserve.proxies.exchange.server_state` in a state that the test sets."""

    def __init__(self, **state: Any) -> None:
        self.body: Any = SimpleNamespace(received_bytes=10, is_full=False)
        self.unread: Any = None
        self.wants_body = self.response_started = self.response_complete = self.is_over = False
        #: The statuses of its refusals.
        self.refused: list[int] = []
        #: The argument ``is_late`` of each probe.
        self.probes: list[bool] = []
        vars(self).update(state)

    def finish_response(self) -> None:
        self.response_complete = True

    def refuse(self, status: int, text: str, headers: Any = ()) -> None:
        self.refused.append(status)

    def probe_client(self, *, is_late: bool) -> None:
        self.probes.append(is_late)

    def on_connection_close(self) -> None:
        self.is_over = True
