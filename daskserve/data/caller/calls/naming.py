"""Adds the names of both deployments to the error of a call that was lost, or was not answered in time.

A connection raises the error, and knows only addresses. The name of the called deployment is added where the
request was sent, and the name of the caller where the response is read.
"""

from __future__ import annotations

from typing import TypeVar

from daskserve.common.types import BackendTag, EndpointTag, described
from daskserve.context import current_replica
from daskserve.errors import CALL_FROM, ActorLostError, RequestTimeoutError, ServeError
from daskserve.payload.packed_errors import PackedError, unpacked

NamedErrorT = TypeVar("NamedErrorT", bound=BaseException)

_NAMED = (ActorLostError, RequestTimeoutError)
_CALL_TO = "A call to "


def caller_here() -> BackendTag:
    """Return the deployment to which the current code belongs; empty outside of replicas."""
    replica = current_replica.get()
    return "" if replica is None else replica.backend_tag


def with_called(error: NamedErrorT, endpoint: EndpointTag, *, is_legacy: bool) -> NamedErrorT:
    """Return the error of a call, with the name of the called deployment if it has none yet."""
    if type(error) not in _NAMED or str(error).startswith((_CALL_TO, CALL_FROM)):
        return error
    return _renamed(error, _text(endpoint, is_legacy, str(error)))


def late_text(request_id: str, endpoint: EndpointTag, *, is_legacy: bool) -> str:
    """Return the text of the error of a call that was not answered in time."""
    return _text(endpoint, is_legacy, f"Request {request_id} was not answered before its deadline.")


def _text(endpoint: EndpointTag, is_legacy: bool, text: str) -> str:
    called = f"endpoint {endpoint!r}" if is_legacy else described(endpoint)
    return f"{_CALL_TO}{called} failed: {text}"


def as_read(error: BaseException) -> BaseException:
    """Return the error of a call in the form for its reader; may run code of the error's class."""
    # An error that a replica has packed belongs to another call, further down the chain.
    return unpacked(error) if type(error) is PackedError else with_caller(unpacked(error))


def with_caller(error: NamedErrorT) -> NamedErrorT:
    """Return an error, with the name of the calling deployment if a replica reads the response."""
    replica = current_replica.get()
    if replica is None or type(error) not in _NAMED or not str(error).startswith(_CALL_TO):
        return error
    caller = replica.display_name
    return _renamed(error, f"{CALL_FROM}{caller} to {str(error).removeprefix(_CALL_TO)}")


def _renamed(error: NamedErrorT, text: str) -> NamedErrorT:
    # A copy: all calls that a process has lost may share one error.
    assert isinstance(error, ServeError)
    copy = type(error)(text)
    vars(copy).update(vars(error))
    copy.__cause__ = error.__cause__
    return copy
