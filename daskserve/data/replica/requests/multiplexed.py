"""Requests that hold the multiplexed models that their code uses, until the code has ended.

Only replicas with multiplexed functions create these kinds of requests.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from daskserve.common.types import Envelope
from daskserve.context import RequestContext, current_request
from daskserve.data.replica.requests.replica_request import LocalRequest
from daskserve.data.replica.requests.states import DONE, RequestEvent


class MultiplexedRequest(LocalRequest):
    """The common part of these kinds of requests."""

    __slots__ = ()

    def request_context(self, envelope: Envelope) -> RequestContext:
        context: RequestContext = super().request_context(envelope)
        context.add_facts({"held": {}})
        return context

    def answered(self) -> None:
        super().answered()
        _give_back(self)

    def _close(self, event: RequestEvent) -> None:
        super()._close(event)
        _give_back(self)

    def _free_if_ended(self) -> None:
        super()._free_if_ended()
        _give_back(self)


def _give_back(request: LocalRequest) -> None:
    """Release the models of a request that has ended."""
    context: Any = getattr(request, "context", None)  # no context exists until user code begins
    current = None if context is None or request.state != DONE else context.get(current_request)
    # Without `held`, code that still runs holds no further models.
    held = None if current is None else vars(current).pop("held", None)
    while held:
        try:
            _, give_back = held.popitem()
        except KeyError:  # code in another thread added this model too late, and has released it itself
            break
        give_back()


@lru_cache(maxsize=32)
def multiplexed_request(kind: Any) -> Any:
    """Return the class of requests of a kind that hold models."""
    return type(f"Multiplexed{kind.__name__}", (MultiplexedRequest, kind), {"__slots__": ()})
