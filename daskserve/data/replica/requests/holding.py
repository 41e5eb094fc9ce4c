"""Requests that hold the multiplexed models that their code uses, until that code has ended.

Only the replicas of deployments with a multiplexed function make these kinds of requests.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from daskserve.common.types import Envelope
from daskserve.context import RequestContext, current_request
from daskserve.data.replica.requests.replica_request import LocalRequest
from daskserve.data.replica.requests.states import DONE, RequestEvent


class HoldingRequest(LocalRequest):
    """What these kinds of requests have in common."""

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
    """Give back the models of a request that has ended."""
    context: Any = getattr(request, "context", None)  # there is none until user code begins
    present = None if context is None or request.state != DONE else context.get(current_request)
    # Without `held`, code that runs on holds nothing more.
    held = None if present is None else vars(present).pop("held", None)
    while held:
        try:
            _, give_back = held.popitem()
        except KeyError:  # code on another thread was adding that one, and has given it back itself
            break
        give_back()


def holding(kind: Any) -> Any:
    """Return the kind of requests that hold models, for another kind."""
    return _holding(kind)


@lru_cache(maxsize=32)
def _holding(kind: Any) -> Any:
    return type(f"Holding{kind.__name__}", (HoldingRequest, kind), {"__slots__": ()})
