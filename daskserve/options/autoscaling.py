"""The options of autoscaling, each defined once; what policies see of them is in
`daskserve.autoscaling.context`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator, model_validator

from daskserve.options.bounds import Bounds
from daskserve.options.credentials import masked, validated
from daskserve.options.queues import QueueOptions, queue_options_of

#: Policies that come with daskserve. Any other text is an import path.
BUILT_IN_POLICIES = (
    "target_ongoing_requests",
    "classic",
    "latency",
    "promql",
    "custom_metric",
    "queue",
    "schedule",
)
#: How long a burst has to be seen, where the config leaves it to us.
BURST_WINDOW_S = 6.0


class AutoscalingConfig(BaseModel):
    """Between which bounds a backend's replicas are scaled, by what, and how fast."""

    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        populate_by_name=True,
        arbitrary_types_allowed=True,
        # Infinity passes every lower bound and then never ends, or divides to nothing.
        ser_json_inf_nan="constants",
    )

    min_replicas: int = Field(
        1, ge=0, description="Never fewer; 0 lets an idle backend have none, and holds what comes then."
    )
    max_replicas: int = Field(1, ge=1, description="Never more.")
    initial_replicas: int | None = Field(
        None, ge=0, description="How many to begin with. None: ``min_replicas``."
    )
    multiple_of: int = Field(
        1,
        ge=1,
        description="Replicas work in groups of so many: each number is rounded up to whole groups, as "
        "far as ``max_replicas`` has room for them.",
    )
    policy: Any = Field(
        "target_ongoing_requests",
        description="What decides: ``target_ongoing_requests``, ``classic``, ``latency``, ``promql``, "
        '``custom_metric``, ``queue``, ``schedule``, an import path ``"module:function"``, or a function.',
    )
    policy_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments for the policy."
    )
    group: str | None = Field(
        None,
        min_length=1,
        description="Decide together about all backends that name this group and the same policy of your "
        "own: it is called once, with a dict of their contexts by name, and returns a dict.",
    )
    target_ongoing_requests: float = Field(
        2,
        gt=0,
        description="So many requests running or waiting per replica is right.",
        validation_alias=AliasChoices("target_ongoing_requests", "target_num_ongoing_requests_per_replica"),
    )
    metrics_interval_s: float = Field(1, ge=0.01, description="How often is looked and decided.")
    look_back_period_s: float = Field(
        30, gt=0, description="Over how long figures are taken together; at most back to the last change."
    )
    aggregation_function: Literal["mean", "max", "min"] = Field(
        "mean", description="How figures are taken together."
    )
    smoothing_factor: float = Field(
        1, gt=0, description="Share of a wanted change to make at a time; above 1 goes further than that."
    )
    upscaling_factor: float | None = Field(
        None, gt=0, description="The same for going up alone. None: ``smoothing_factor``."
    )
    downscaling_factor: float | None = Field(
        None, gt=0, description="The same for going down alone. None: ``smoothing_factor``."
    )
    upscale_delay_s: float = Field(
        30, ge=0, description="More replicas must be wanted for so long before there are more."
    )
    downscale_delay_s: float = Field(
        600, ge=0, description="Fewer replicas must be wanted for so long before there are fewer."
    )
    downscale_to_zero_delay_s: float | None = Field(
        None,
        ge=0,
        description="No request must have been there for so long before the last replica goes. None: "
        "``downscale_delay_s``.",
    )
    burst_window_s: float | None = Field(
        None,
        ge=0,
        description="If the load of so short a time wants ``burst_factor`` times the replicas, do not wait "
        "for ``upscale_delay_s``; 0 always waits. None: 6 s, or 0 where ``upscale_delay_s`` was set.",
    )
    burst_factor: float = Field(2, gt=1, description="How much more than there is makes a burst.")
    drain_period_s: float = Field(
        10, gt=0, description="How fast a queue that has built up is to be worked off, beside the new load."
    )
    hysteresis: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="Change nothing while the load is within this share of what the replicas there are "
        "should have.",
    )
    max_upscale_factor: float | None = Field(
        None, gt=1, description="One step up at most multiplies the replicas by this. None: no limit."
    )
    max_downscale_factor: float | None = Field(
        None, gt=1, description="One step down at most divides the replicas by this. None: no limit."
    )
    dry_run: bool = Field(
        False, description="Change nothing, but say in the log and the status what would have been done."
    )
    prometheus_address: str | None = Field(
        None, description="Where a Prometheus server answers, such as ``http://prometheus:9090``."
    )
    prometheus_queries: dict[str, str] = Field(
        default_factory=dict, description="PromQL expressions by name, each of one value."
    )
    prometheus_interval_s: float = Field(5, ge=0.1, description="How often Prometheus is asked.")
    prometheus_max_age_s: float = Field(15, gt=0, description="An older value is no longer gone by.")

    @model_validator(mode="before")
    @classmethod
    def _policy_of_its_own(cls, values: Any) -> Any:
        """Accept ``policy={"policy_function": ..., "policy_kwargs": {...}}``, today's other spelling."""
        if not (isinstance(values, Mapping) and isinstance(values.get("policy"), Mapping)):
            return values
        policy = dict(values["policy"])
        rest = {name: value for name, value in values.items() if name != "policy"}
        found = {"policy": policy.pop("policy_function", cls.model_fields["policy"].default)}
        if "policy_kwargs" in policy:
            found["policy_kwargs"] = policy.pop("policy_kwargs")
        if policy:
            raise ValueError(
                f"policy has no option {sorted(policy)[0]!r}; it takes policy_function and policy_kwargs"
            )
        return {**rest, **found}

    @field_validator("*")
    @classmethod
    def _is_finite(cls, value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{value} is not a number that can be scaled by; give a finite one")
        return value

    @field_validator("policy")
    @classmethod
    def _is_a_policy(cls, value: Any) -> Any:
        if callable(value) or isinstance(value, bytes) or value in BUILT_IN_POLICIES:
            return value
        module, colon, name = value.partition(":") if isinstance(value, str) else ("", "", "")
        if not (module and colon and name) or ":" in name:
            raise ValueError(
                f"policy is {value!r}; it must be one of {', '.join(BUILT_IN_POLICIES)}, an import path "
                '"module:function", or a function'
            )
        return value

    @model_validator(mode="after")
    def _bounds_agree(self) -> AutoscalingConfig:
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas={self.max_replicas} is less than min_replicas={self.min_replicas}; raise the "
                "one or lower the other"
            )
        unit = self.multiple_of
        least, most = -(-self.min_replicas // unit) * unit, self.max_replicas // unit * unit
        if not 0 < most >= least:
            raise ValueError(
                f"no multiple_of={unit} lies between min_replicas={self.min_replicas} and max_replicas="
                f"{self.max_replicas}; make max_replicas {max(least, unit)} or more, or lower multiple_of"
            )
        first = self.initial_replicas
        if first is not None and not self.min_replicas <= first <= self.max_replicas:
            raise ValueError(
                f"initial_replicas={first} is not between min_replicas={self.min_replicas} and "
                f"max_replicas={self.max_replicas}; choose one of these, or leave it out for the least"
            )
        if self.group is not None and self.policy in BUILT_IN_POLICIES:
            raise ValueError(
                f"group={self.group!r} is given, and policy {self.policy!r} decides about each backend by "
                "itself; leave group out, or give a policy of your own, a function or an import path, that "
                "takes a dict of contexts by name and returns a dict of numbers"
            )
        if self.policy == "promql" and not (self.prometheus_address and self.prometheus_queries):
            raise ValueError(
                'policy "promql" needs prometheus_address, such as "http://prometheus:9090", and '
                'prometheus_queries, such as {"lag": "sum(consumer_lag)"}'
            )
        if self.policy == "custom_metric" and not {"metric", "target"} <= self.policy_kwargs.keys():
            raise ValueError(
                f'policy "custom_metric" has policy_kwargs={self.policy_kwargs!r}; it needs a metric that '
                'record_autoscaling_stats returns and a target per replica, such as {"metric": "tokens", '
                '"target": 1000}'
            )
        self.queue_options()
        return self

    @model_validator(mode="wrap")
    @classmethod
    def _errors_without_credentials(cls, values: Any, validate: Any) -> Any:
        return validated(values, validate)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, masked(value) if name in ("policy_kwargs", "prometheus_address") else value

    def queue_options(self) -> QueueOptions | None:
        """Return the broker's queue that the policy ``queue`` goes by; None for other policies."""
        return queue_options_of(self.policy, self.policy_kwargs)

    @property
    def up_factor(self) -> float:
        """The share of a wanted change upwards to make at a time."""
        return self.smoothing_factor if self.upscaling_factor is None else self.upscaling_factor

    @property
    def down_factor(self) -> float:
        """The share of a wanted change downwards to make at a time."""
        return self.smoothing_factor if self.downscaling_factor is None else self.downscaling_factor

    @property
    def zero_delay_s(self) -> float:
        """How long a backend must be idle before its last replica goes."""
        delay_s = self.downscale_to_zero_delay_s
        return self.downscale_delay_s if delay_s is None else delay_s

    @property
    def first_replicas(self) -> int:
        """How many replicas to begin with."""
        return self.min_replicas if self.initial_replicas is None else self.initial_replicas

    @property
    def burst_s(self) -> float:
        """How short a time tells a burst; 0 for none. Who sets a delay upwards gets that delay."""
        if self.burst_window_s is not None:
            return self.burst_window_s
        return 0.0 if "upscale_delay_s" in self.model_fields_set else BURST_WINDOW_S

    def doubts(self) -> list[str]:
        """Return what is allowed here, but will hardly do what was meant, with the remedy."""
        found = []
        if self.policy == "classic" and self.upscale_delay_s < self.look_back_period_s:
            found.append(
                f"upscale_delay_s={self.upscale_delay_s:g} is less than look_back_period_s="
                f"{self.look_back_period_s:g}: the classic policy goes on counting the load from before a "
                "change, and so changes again; raise the delay, or use target_ongoing_requests"
            )
        if self.downscale_delay_s < self.look_back_period_s:
            found.append(
                f"downscale_delay_s={self.downscale_delay_s:g} is less than look_back_period_s="
                f"{self.look_back_period_s:g}: replicas will go in every short lull and have to start again; "
                "raise the delay or shorten the look-back"
            )
        if self.smoothing_factor > 1 or self.up_factor > 1 or self.down_factor > 1:
            found.append("a factor above 1 goes past what the load wants, and then back; 1 or less settles")
        bounds = Bounds.of(self)
        if bounds.least == bounds.most:
            found.append(
                f"min_replicas and max_replicas are both {bounds.most}, so there is nothing to scale; "
                "raise max_replicas"
            )
        return found
