"""Keeps the handles of a program: `get_handle` returns the same one until its endpoint changes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from daskserve.cluster.protocols.base import Process
from daskserve.common.types import EndpointTag
from daskserve.data.caller.calls.handle import Handle, routers_of
from daskserve.data.caller.routing.router import Router
from daskserve.errors import NotFoundError, RequestTimeoutError

#: Number of handles from which outdated ones are dropped.
SWEPT = 64


def handles_of(cluster: Process) -> KnownHandles:
    """Return the handles of a process for an instance, which all of its clients share."""
    handles: KnownHandles = cluster.shared.setdefault("handles", KnownHandles())
    return handles


class KnownHandles:
    """The handles of a process for an instance, by endpoint, each with the state it was made from."""

    def __init__(self) -> None:
        self._handles: dict[EndpointTag, tuple[Handle, Router, Any]] = {}
        #: The number of handles at which to look for outdated ones; it doubles, so that sweeps are rare.
        self._sweep_at = SWEPT

    def get(self, endpoint: EndpointTag) -> Handle | None:
        """Return the handle of an endpoint; None if there is none, or the endpoint has changed since."""
        if endpoint not in self._handles:
            return None
        handle, router, published = self._handles[endpoint]
        return handle if router.published is published else None

    def keep(self, handle: Handle, router: Router, facts: Mapping[str, Any]) -> None:
        """Keep a handle made from the controller's answer, provided that the published state agrees with the
        answer."""
        published = router.published
        if (
            published is not None
            and published["legacy"] == facts["is_legacy"]
            and list(published["python_methods"]) == list(facts["python_methods"])
        ):
            self._handles[router.endpoint] = (handle, router, published)
            if len(self._handles) >= self._sweep_at:
                self._sweep()

    def _sweep(self) -> None:
        """Drop the handles of endpoints that were deleted or have changed, each with its router."""
        # A copy: another thread may add one meanwhile.
        kept = {name: each for name, each in self._handles.copy().items() if self.get(name) is not None}
        self._handles = kept
        self._sweep_at = max(SWEPT, 2 * len(kept))


async def open_router(cluster: Process, endpoint: EndpointTag, *, exists: bool) -> Router:
    """Return the router of an endpoint, which knows the endpoint if it exists; runs on the connection's loop.

    The router starts here and not at the first call, so that the handle gets later changes by this program.
    """
    router = (await routers_of(cluster)).router(endpoint)
    if exists:
        # The endpoint may be deleted meanwhile; then the first call fails.
        with suppress(NotFoundError, RequestTimeoutError):
            await router.wait_until_known()
    return router
