"""The options of a rollout: its steps, its comparisons, and which requests get the new version."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from daskserve.common.formatting import as_whole, shown
from daskserve.common.types import split_import_path
from daskserve.options.fields.base import Masked, Options, Secret
from daskserve.options.fields.secrets import masked
from daskserve.options.routing.request_router import SessionPart

_PERCENT = re.compile(r"([0-9]{1,3}(?:\.[0-9]+)?) ?%")


def percent_of(value: Any) -> float:
    """Return a share such as ``"25%"`` or ``25`` in percent.

    Raises
    ------
    ValueError
        The value is neither a percentage from 0 to 100 nor a whole number.
    """
    number = as_whole(value)
    if isinstance(value, str) and (match := _PERCENT.fullmatch(value.strip())):
        percent = float(match[1])
    elif number is not None:
        percent = float(number)
    else:
        percent = -1.0
    if not 0 <= percent <= 100:
        raise ValueError(f'{value!r} is not a share of the traffic; give a percentage such as "25%"')
    return percent


def _checked_share(value: Any) -> str:
    return f"{shown(percent_of(value))}%"


def _as_path(value: Any) -> Any:
    """Return the import path of a function, by which other processes import it."""
    if not callable(value):
        return value
    path = f"{value.__module__}:{getattr(value, '__qualname__', value)}"
    if value.__module__ == "__main__" or not path.replace(":", ".").replace(".", "").isidentifier():
        raise ValueError(f"{path} cannot be imported by other processes; move the function into a module")
    return path


def _checked_path(value: str | None) -> str | None:
    if value is not None:
        split_import_path(value)
    return value


#: A share of the traffic, kept as ``"25%"``.
Share: TypeAlias = Annotated[str, BeforeValidator(_checked_share)]
#: The default steps.
STEPS = ("5%", "25%", "100%")
#: The default of `Gate.detects` by metric.
DETECTS: Mapping[str, str] = {"error_rate": "2%", "latency": "10%"}


class Gate(Options):
    """One comparison of the new version with the old one; if it fails, the rollout is rolled back."""

    place: ClassVar[str] = "rollout.gates"

    metric: Literal["error_rate", "latency", "prometheus"] = Field(
        "error_rate",
        description="What is compared: the share of failed requests, of slow ones, or the value of a PromQL "
        "expression, which is worse if it is larger.",
    )
    quantile: float = Field(
        0.95,
        gt=0,
        lt=1,
        description="For ``latency``: a request is slow if it takes longer than this share of the old "
        "version's requests.",
    )
    tolerance: float = Field(
        0.1,
        ge=0,
        le=10,
        description="By how much the new version may be worse: 0.1 accepts a tenth more errors or slow "
        "requests, or a tenth larger value.",
    )
    detects: Share | None = Field(
        None,
        description="The increase that a step must be able to detect, as a share of all requests: a step "
        "lasts until the new version has completed enough requests for this. If the old version's own "
        "share is larger, that share is used. None: ``2%`` of failed requests, ``10%`` of slow ones.",
    )
    query: str = Field(
        "",
        description="For ``prometheus``: an expression with one value. ``$replicas`` in it stands for a "
        "regular expression that matches the label ``replica`` of one version, ``$version`` for its name.",
    )
    prometheus_address: Annotated[Secret | None, Masked(masked)] = Field(
        None, description="For ``prometheus``: address of the server, such as ``http://prometheus:9090``."
    )
    interval_s: float = Field(
        15,
        ge=0.1,
        description="For ``prometheus``: time between two comparisons in seconds, at least the window of "
        "the expression's ``rate``, so that no request is in two comparisons.",
    )

    @model_validator(mode="after")
    def _is_complete(self) -> Gate:
        has_query = bool(self.query) and self.prometheus_address is not None
        if self.metric == "prometheus" and not has_query:
            raise ValueError("a gate with metric='prometheus' needs query and prometheus_address; give both")
        if self.metric != "prometheus" and (self.query or self.prometheus_address is not None):
            raise ValueError(
                f"query and prometheus_address are given together with metric={self.metric!r}, which does "
                "not use them; set metric='prometheus', or leave them out"
            )
        return self


class RolloutConfig(Options):
    """How the traffic moves to a new version of a deployment: in steps, compared with the old one."""

    place: ClassVar[str] = "rollout"

    steps: list[Share] = Field(
        default_factory=lambda: list(STEPS),
        min_length=1,
        max_length=100,
        description=(
            'Shares of the traffic that the new version gets, one after another, as ``"5%"``. After the '
            "last one, the old version stops; if that is less than 100 %, its replicas are replaced one by "
            "one as without a rollout. ``0%`` only starts the replicas, for requests that name the version "
            "and for copies."
        ),
    )
    pause_s: float | None = Field(
        60,
        ge=0,
        description="Minimum time in seconds at each step. None: until ``promote``.",
    )
    min_requests: int = Field(
        100,
        ge=0,
        description="Minimum number of requests that the new version must complete at a step. The gates may "
        "need more, see ``detects``. At ``0%`` with ``shadow``: minimum number of compared answers.",
    )
    gates: list[Gate] = Field(
        default_factory=lambda: [Gate()],
        max_length=10,
        description="Comparisons with the old version over the same time. Empty: none.",
    )
    false_alarm: float = Field(
        0.001,
        gt=0,
        le=0.2,
        description="Probability with which a new version that is as good as the old one is rolled back, "
        "over all steps and gates.",
    )
    sticky: SessionPart | None = Field(
        None,
        description="The part of an HTTP request that names its session, ``header:NAME`` or ``cookie:NAME``: "
        "a session stays with its version. Calls of handles are sticky by their ``session_id``.",
    )
    shadow: Share = Field(
        "0%",
        description="Share of the old version's requests that are copied to the new version. Its answer is "
        "compared with ``compare`` and dropped.",
    )
    compare: Annotated[str | None, BeforeValidator(_as_path), AfterValidator(_checked_path)] = Field(
        None,
        description="Import path ``module:function`` of the function that compares two answers of a shadowed "
        "request, the old version's first, and returns whether they are equal. None: they are equal if their "
        "status and body are, or their values.",
    )

    @field_validator("steps", mode="after")
    @classmethod
    def _rise(cls, value: list[str]) -> list[str]:
        shares = [percent_of(each) for each in value]
        if any(later <= earlier for earlier, later in itertools.pairwise(shares)):
            raise ValueError(
                f"the steps {value} do not increase; give each step a larger share than the one before"
            )
        return value

    @property
    def shares(self) -> list[float]:
        """The shares of the steps, from 0 to 1."""
        return [percent_of(each) / 100 for each in self.steps]
