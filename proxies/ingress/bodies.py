"""What the ingress does with the body of a request before it sends the request to a replica.

A plain function cannot wait for its body, so the body is gathered first: a client that sends it slowly, or
not at all, then holds a connection and no slot of a replica. The endpoint also sets the maximum size.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from daskserve.proxies.exchange.carrier import present_exchange
from daskserve.types import BodyUse


class BodyRouter(Protocol):
    """The part of `daskserve.data.caller.router.Router` that knows about bodies."""

    def body_rules(self, default_max_bytes: int, /) -> tuple[BodyUse, int]:
        """Return what happens to the bodies of HTTP requests, and their maximum size."""

    def check_queue(self) -> None:
        """Raise `BackPressureError` if no further request may wait for a slot."""


class BodyGate:
    """Prepares the bodies of one ingress.

    Parameters
    ----------
    router_of : callable
        Returns the router of an endpoint.
    max_body_bytes : int
        The maximum size for backends without one of their own.
    """

    def __init__(self, router_of: Callable[[str], BodyRouter], max_body_bytes: int) -> None:
        self._router_of = router_of
        self._max_body_bytes = max_body_bytes

    def enter(self, endpoint: str) -> Awaitable[None] | None:
        """Begin a request with a body of the present task; return what to wait for before it is sent.

        Raises
        ------
        BodyTooLargeError
            The body exceeds the maximum size.
        BackPressureError
            The body has not arrived, and no further request may wait for a slot.
        """
        found = present_exchange.get()
        exchange = None if found is None else found()
        if exchange is None:
            return None
        router, body = self._router_of(endpoint), exchange.body
        use, max_bytes = router.body_rules(self._max_body_bytes)
        body.limit_to(max_bytes)
        if use == "stream" or body.is_ended:
            return None
        router.check_queue()
        return body.gather(drops=use == "drop")
