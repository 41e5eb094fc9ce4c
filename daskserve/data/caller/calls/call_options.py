"""The options of a handle's calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Self

from daskserve.errors import BadRequestError
from daskserve.options.fields.priority import MAX_PRIORITY
from daskserve.payload.serialization import check_serialization

#: The spelling of options that begin with an underscore, as in Ray Serve.
_UNDERSCORED: Mapping[str, str] = {
    "prefer_local_routing": "_prefer_local_routing",
    "by_reference": "_by_reference",
}
#: Options that are sent to the replica with each call.
_CARRIED = ("multiplexed_model_id", "session_id", "priority", "idempotent", "response_serialization")


@dataclass(frozen=True, slots=True)
class CallOptions:
    """The options of a handle's calls.

    Attributes
    ----------
    method_name : str
        The method of the backend's class.
    shard_key : str
        Calls with the same key go to the same backend until the traffic policy changes.
    http_method, http_headers
        The method and headers of the request object that a classic backend receives.
    timeout_s : float or None
        Timeout of the call in seconds; after it the call raises `RequestTimeoutError`. A call made while a
        request is handled also ends at the deadline of that request.
    stream : bool
        Whether the method is a generator; its calls then return a `ResponseGenerator`.
    multiplexed_model_id, session_id : str
        Ids that user code in the replica reads from its request context. A ``session_id`` is also the shard
        key of calls that have none.
    priority : int or str
        Waiting requests with a greater priority go first: a number from -100 to 100, or a name in the
        deployment's ``priority_config``. User code can read it from its request context.
    idempotent : bool
        Whether a call may run twice. Then it is retried if its replica dies, at most ``max_crash_retries``
        times (an option of the deployment), and ``hedging_config`` applies to it. It has no effect on
        streams.
    request_serialization, response_serialization : str
        How arguments and results are serialized: ``"cloudpickle"`` (by the standard pickler if it can),
        ``"pickle"``, ``"msgpack"`` or ``"orjson"``.
    by_reference : bool
        Whether a response that is passed as an argument is sent directly from its replica to the called one,
        or else through this process. Spelled ``_by_reference``.
    result : str
        ``"value"``, or ``"future"``: the result stays on the cluster, and reading the response returns a
        `distributed.Future` of it.
    prefer_local_routing : bool
        Without effect: a replica in the caller's process is preferred whenever it answers sooner. Spelled
        ``_prefer_local_routing``.
    """

    method_name: str = "__call__"
    shard_key: str = ""
    http_method: str = "GET"
    http_headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None
    stream: bool = False
    multiplexed_model_id: str = ""
    session_id: str = ""
    priority: int | str = 0
    idempotent: bool = False
    request_serialization: str = "cloudpickle"
    response_serialization: str = "cloudpickle"
    by_reference: bool = True
    prefer_local_routing: bool = True
    result: str = "value"

    def __post_init__(self) -> None:
        timeout_s: Any = self.timeout_s
        is_number = isinstance(timeout_s, Real) and not isinstance(timeout_s, bool)
        if timeout_s is not None and not (is_number and float(timeout_s) > 0):
            raise BadRequestError(f"timeout_s must be more than 0, or None; got {timeout_s!r}.")
        for name in ("method_name", "shard_key", "multiplexed_model_id", "session_id"):
            if not isinstance(getattr(self, name), str):
                raise BadRequestError(f"{name} must be a string; got {getattr(self, name)!r}.")
        for name in ("stream", "idempotent", "by_reference", "prefer_local_routing"):
            if getattr(self, name) not in (True, False, None):
                raise BadRequestError(f"{name} must be True or False; got {getattr(self, name)!r}.")
        number = self.priority
        if isinstance(number, bool) or not isinstance(number, (int, str)):
            raise BadRequestError(f"priority must be a number or a name; got {number!r}.")
        if isinstance(number, int) and abs(number) > MAX_PRIORITY:
            raise BadRequestError(f"priority must be from -{MAX_PRIORITY} to {MAX_PRIORITY}; got {number}.")
        if self.result not in ("value", "future"):
            raise BadRequestError(f"result must be 'value' or 'future'; got {self.result!r}.")
        if self.result == "future" and self.stream:
            raise BadRequestError(
                "result='future' and stream=True exclude each other: a stream has no result."
            )
        check_serialization("request_serialization", self.request_serialization)
        check_serialization("response_serialization", self.response_serialization)

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """Return a copy with changed options; raise `TypeError` for an unknown one, with the valid names."""
        if unknown := sorted(changes.keys() - OPTIONS.keys()):
            raise TypeError(f"A handle has no option {unknown[0]!r}; known options: {', '.join(OPTIONS)}.")
        return replace(self, **{OPTIONS[name]: value for name, value in changes.items()})

    def differences(self) -> tuple[tuple[str, Any], ...]:
        """Return the options that differ from their defaults, with the names that `changed` takes."""
        values = ((name, getattr(self, field), getattr(DEFAULTS, field)) for name, field in OPTIONS.items())
        return tuple((name, value) for name, value, default in values if value != default)

    def carried(self) -> dict[str, Any] | None:
        """Return the options that are sent with each call; None if all of them have their defaults."""
        values = ((name, getattr(self, name)) for name in _CARRIED)
        return {name: value for name, value in values if value != getattr(DEFAULTS, name)} or None


DEFAULTS = CallOptions()
#: The fields of the options, by the names that callers write.
OPTIONS: Mapping[str, str] = {_UNDERSCORED.get(name, name): name for name in CallOptions.__dataclass_fields__}
