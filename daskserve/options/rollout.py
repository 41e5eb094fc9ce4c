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
        description="What is compared: the share of failed requests, the share of slow ones, or the "
        "value of a PromQL expression, for which larger is worse.",
    )
    quantile: float = Field(
        0.95,
        gt=0,
        lt=1,
        description="For ``latency``: a request is slow if its latency is above this quantile of the old "
        "version's latencies.",
    )
    tolerance: float = Field(
        0.1,
        ge=0,
        le=10,
        description="How much worse the new version may be, as a share: 0.1 accepts 10 % more errors or "
        "slow requests, or a value 10 % larger.",
    )
    detects: Share | None = Field(
        None,
        description="Smallest increase that a step must be able to detect, as a share of all requests. A "
        "step lasts until the new version has completed enough requests to detect it. If the old version's "
        "own share is larger, that share is used. None: ``2%`` of failed requests, ``10%`` of slow ones.",
    )
    query: str = Field(
        "",
        description="For ``prometheus``: an expression with one value. In it, ``$replicas`` is replaced "
        "by a regular expression that matches the label ``replica`` of one version, and ``$version`` by "
        "the name of that version.",
    )
    prometheus_address: Annotated[Secret | None, Masked(masked)] = Field(
        None, description="For ``prometheus``: address of the server, such as ``http://prometheus:9090``."
    )
    interval_s: float = Field(
        15,
        ge=0.1,
        description="For ``prometheus``: time between two comparisons, in seconds. It must be at least "
        "the window of the expression's ``rate``, so that no request counts twice.",
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
            "Shares of the traffic that the new version gets, one after another, such as "
            '``"5%"``. After the last step, the old version stops. If the last step is below 100 %, the '
            "remaining replicas are then replaced one by one, as without a rollout. At ``0%``, the new "
            "replicas run, but get only copies and requests that name the version."
        ),
    )
    pause_s: float | None = Field(
        60,
        ge=0,
        description="Minimum duration of each step, in seconds. None: until ``promote`` is called.",
    )
    min_requests: int = Field(
        100,
        ge=0,
        description="Minimum number of requests that the new version must complete in each step. Gates "
        "may need more, see ``detects``. At ``0%`` with ``shadow``: minimum number of compared answers.",
    )
    gates: list[Gate] = Field(
        default_factory=lambda: [Gate()],
        max_length=10,
        description="Comparisons with the old version over the same period. Empty: none.",
    )
    false_alarm: float = Field(
        0.001,
        gt=0,
        le=0.2,
        description="Probability that a new version is rolled back although it is as good as the old "
        "one, over all steps and gates.",
    )
    sticky: SessionPart | None = Field(
        None,
        description="Where an HTTP request has the id of its session, ``header:NAME`` or "
        "``cookie:NAME``. All requests of a session go to one version. For calls by handle, the session is "
        "their ``session_id``.",
    )
    shadow: Share = Field(
        "0%",
        description="Share of the old version's requests that are copied to the new version. The answer "
        "to a copy is compared by ``compare`` and dropped.",
    )
    compare: Annotated[str | None, BeforeValidator(_as_path), AfterValidator(_checked_path)] = Field(
        None,
        description="Import path ``module:function`` of a function that gets the two answers to a "
        "shadowed request, the old version's first, and returns whether they are equal. None: HTTP "
        "responses are equal if their status and body are, other answers if their values are.",
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
