"""How the replica of a request is chosen."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import AfterValidator, Field, field_validator, model_validator

from daskserve.common.types import split_import_path
from daskserve.options.fields.base import Masked, Options
from daskserve.options.fields.code import Code
from daskserve.options.fields.pickled import PICKLED
from daskserve.options.fields.secrets import masked

#: The default router; its options are not published.
DEFAULT_ROUTER = "PowerOfTwo"
#: The built-in routers; `daskserve.data.caller.request_routers.loading` has the classes of all but the first.
BUILT_IN_ROUTERS = (
    DEFAULT_ROUTER,
    "RoundRobin",
    "ConsistentHash",
    "LeastLatency",
    "PrefixAffinity",
    "SameHost",
)
#: The built-in routers by the names of their classes, here and in Ray Serve.
_CLASSES: Mapping[str, str] = {
    **{name: name for name in BUILT_IN_ROUTERS},
    **{f"{name}Router": name for name in BUILT_IN_ROUTERS},
    "PowerOfTwoChoicesRequestRouter": DEFAULT_ROUTER,
    "PrefixCacheAffinityRouter": "PrefixAffinity",
}
#: Prefixes of the modules with these classes.
_HOMES = ("ray.serve.", "ray.llm.", "daskserve.")
MAX_KWARGS_CHARACTERS = 16_384
_SESSION = re.compile(r"(header|cookie):([!#$%&'*+.^_`|~0-9A-Za-z-]+)")


def _checked_session(value: str) -> str:
    if not _SESSION.fullmatch(value):
        raise ValueError(f"{value!r} names no part of a request; give 'header:X-Session' or 'cookie:session'")
    return value


#: The type of an option that names the part of an HTTP request with the id of its session.
SessionPart: TypeAlias = Annotated[str, AfterValidator(_checked_session)]


class RequestRouterConfig(Options):
    """How the replica of a request is chosen."""

    place: ClassVar[str] = "request_router_config"

    request_router_class: Code = Field(
        DEFAULT_ROUTER,
        description="The router: ``PowerOfTwo``, ``RoundRobin``, ``ConsistentHash``, ``LeastLatency``, "
        "``PrefixAffinity``, ``SameHost``, an import path, or a class, see [Routers](docs/routers.md).",
    )
    request_router_kwargs: Annotated[dict[str, Any], Masked(masked)] = Field(
        default_factory=dict,
        description="Keyword arguments of the router's ``initialize_state``, as JSON values.",
    )
    session: SessionPart = Field(
        "header:X-Session-Id",
        description='Where an HTTP request has the id of its session: ``"header:NAME"`` or '
        '``"cookie:NAME"``. For calls by handle, it is their ``session_id``.',
    )
    request_routing_stats_period_s: float = Field(
        10,
        gt=0,
        description="How often the user's ``record_routing_stats`` is called, in seconds, but not more "
        "often than the health check. A change applies to replicas that start later.",
    )
    request_routing_stats_timeout_s: float = Field(
        30, gt=0, description="Timeout of a call of ``record_routing_stats``, in seconds."
    )
    initial_backoff_s: float = Field(
        0.025,
        gt=0,
        description="How long a request waits before the router is called again, if the router returned "
        "no replica, in seconds. If the router returned only replicas without a free slot, it is called "
        "again when one has a free slot.",
    )
    backoff_multiplier: float = Field(
        2, ge=1, description="Factor by which the wait grows with each attempt."
    )
    max_backoff_s: float = Field(0.5, gt=0, description="Maximum wait between two attempts, in seconds.")

    @field_validator("request_router_class")
    @classmethod
    def _is_a_router(cls, value: Any) -> Any:
        if value is None:
            return DEFAULT_ROUTER
        if isinstance(value, type):
            if not callable(getattr(value, "choose_replicas", None)):
                raise ValueError(
                    f"{value.__name__} has no method choose_replicas; derive it from "
                    "daskserve.request_router.RequestRouter"
                )
            return _built_in(f"{value.__module__}:{value.__name__}") or value
        if not isinstance(value, str):
            raise ValueError(f"{value!r} is neither a class nor a name")
        if value.startswith(PICKLED):
            return value
        if (found := _built_in(value)) is not None:
            return found
        if not all(split_import_path(value)):
            raise ValueError(
                f"{value!r} must be one of {', '.join(BUILT_IN_ROUTERS)}, an import path "
                '"module:Class", or a class'
            )
        if value.startswith("ray."):
            raise ValueError(
                f"{value!r} is Ray's own code; use one of {', '.join(BUILT_IN_ROUTERS)}, or derive a "
                "class from daskserve.request_router.RequestRouter"
            )
        return value

    @field_validator("request_router_kwargs", mode="before")
    @classmethod
    def _is_plain(cls, value: Any) -> Any:
        if value is None:
            return {}
        try:
            text = json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"its values must be JSON values: {error}") from None
        if len(text) > MAX_KWARGS_CHARACTERS:
            raise ValueError(f"it has {len(text)} characters as JSON; {MAX_KWARGS_CHARACTERS} are allowed")
        return value

    @model_validator(mode="after")
    def _default_takes_no_arguments(self) -> RequestRouterConfig:
        if self.request_router_class == DEFAULT_ROUTER and self.request_router_kwargs:
            raise ValueError(
                f"request_router_kwargs has {sorted(self.request_router_kwargs)[0]!r}, but {DEFAULT_ROUTER} "
                "takes no arguments; leave them out, or name another router"
            )
        return self

    def published(self) -> dict[str, Any] | None:
        """Return the options that the processes that send requests need; None for the default router."""
        if self.request_router_class == DEFAULT_ROUTER:
            return None
        return {
            "router": self.request_router_class,
            "kwargs": self.request_router_kwargs,
            "session": self.session,
            "initial_backoff_s": self.initial_backoff_s,
            "backoff_multiplier": self.backoff_multiplier,
            "max_backoff_s": self.max_backoff_s,
        }


def _built_in(path: str) -> str | None:
    """Return the built-in router with this name or class path; None if there is none."""
    module, name = split_import_path(path)
    if not module:
        return _CLASSES.get(path)
    return _CLASSES.get(name) if f"{module}.".startswith(_HOMES) else None
