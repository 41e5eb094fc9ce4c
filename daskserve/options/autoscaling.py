"""The options of autoscaling. The context that policies receive is in `daskserve.autoscaling.context`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, ConfigDict, Field, field_validator, model_validator

from daskserve.common.formatting import shown
from daskserve.common.types import split_import_path
from daskserve.options.fields.base import Masked, Options, Secret
from daskserve.options.fields.bounds import UP, Bounds, share_of
from daskserve.options.fields.code import Code
from daskserve.options.fields.secrets import masked
from daskserve.options.queues import QueueOptions, queue_options_of

#: Policies that come with daskserve. Any other string is an import path.
BUILT_IN_POLICIES = (
    "target_ongoing_requests",
    "classic",
    "latency",
    "promql",
    "custom_metric",
    "queue",
    "schedule",
)
#: Ray Serve's import paths of its default policy, which counts requests like ``target_ongoing_requests``.
RAY_DEFAULT_POLICIES = (
    "ray.serve.autoscaling_policy:default_autoscaling_policy",
    "ray.serve.autoscaling_policy:replica_queue_length_autoscaling_policy",
    "default_autoscaling_policy",
)
#: Ray Serve's older names of options.
_OLD_NAMES: Mapping[str, str] = {
    "upscale_smoothing_factor": "upscaling_factor",
    "downscale_smoothing_factor": "downscaling_factor",
}
#: Default of ``burst_window_s``.
BURST_WINDOW_S = 6.0


class AutoscalingConfig(Options):
    """The bounds, the policy and the speed of a backend's autoscaling."""

    # Without ser_json_inf_nan, an infinite value would be serialized as null.
    model_config = ConfigDict(arbitrary_types_allowed=True, ser_json_inf_nan="constants")
    place: ClassVar[str] = "autoscaling_config"

    min_replicas: int = Field(
        1,
        ge=0,
        description="Minimum number of replicas. With 0, an idle backend has no replicas, and requests wait "
        "until one has started.",
    )
    max_replicas: int = Field(1, ge=1, description="Maximum number of replicas.")
    initial_replicas: int | None = Field(
        None, ge=0, description="Initial number of replicas. None: ``min_replicas``."
    )
    multiple_of: int = Field(
        1,
        ge=1,
        description="Number of replicas that work as a group. The target is rounded up to whole groups, as "
        "far as ``max_replicas`` allows. With ``gang_scheduling_config``, the default is the size of a gang.",
    )
    policy: Code = Field(
        "target_ongoing_requests",
        description="Autoscaling policy: ``target_ongoing_requests``, ``classic``, ``latency``, ``promql``, "
        '``custom_metric``, ``queue``, ``schedule``, an import path ``"module:function"`` or '
        '``"module.function"``, or a function.',
    )
    policy_kwargs: Annotated[dict[str, Any], Masked(masked)] = Field(
        default_factory=dict, description="Keyword arguments of the policy."
    )
    group: str | None = Field(
        None,
        min_length=1,
        description="Group of backends that share one call of the same custom policy. The policy receives a "
        "dict of their contexts by name and returns a dict.",
    )
    target_ongoing_requests: float = Field(
        2,
        gt=0,
        description="Target number of running plus queued requests per replica.",
        validation_alias=AliasChoices("target_ongoing_requests", "target_num_ongoing_requests_per_replica"),
    )
    metrics_interval_s: float = Field(1, ge=0.01, description="How often the policy runs, in seconds.")
    look_back_period_s: float = Field(
        30,
        gt=0,
        description="Window over which load is averaged, in seconds. Load from before the last change of "
        "the number of replicas is left out.",
    )
    aggregation_function: Literal["mean", "max", "min"] = Field(
        "mean", description="How load is aggregated over the window."
    )
    smoothing_factor: float = Field(
        1, gt=0, description="Share of the wanted change that is made in one step; values above 1 overshoot."
    )
    upscaling_factor: float | None = Field(
        None, gt=0, description="``smoothing_factor`` for scaling up. None: ``smoothing_factor``."
    )
    downscaling_factor: float | None = Field(
        None, gt=0, description="``smoothing_factor`` for scaling down. None: ``smoothing_factor``."
    )
    upscale_delay_s: float = Field(
        30, ge=0, description="How long the policy must want more replicas before it scales up, in seconds."
    )
    downscale_delay_s: float = Field(
        600,
        ge=0,
        description="How long the policy must want fewer replicas before it scales down, in seconds.",
    )
    downscale_to_zero_delay_s: float | None = Field(
        None,
        ge=0,
        description="How long a backend must be idle before it scales to zero, in seconds. None: "
        "``downscale_delay_s``.",
    )
    burst_window_s: float | None = Field(
        None,
        ge=0,
        description="Window for detecting a burst, in seconds. In a burst, when the load in this window "
        "needs ``burst_factor`` times the current replicas, scaling up does not wait for "
        "``upscale_delay_s``. 0 disables this. None: 6 s, or 0 if ``upscale_delay_s`` is set.",
    )
    burst_factor: float = Field(
        2, gt=1, description="Ratio of needed to current replicas from which the load is a burst."
    )
    drain_period_s: float = Field(
        10,
        gt=0,
        description="Time in which queued requests should complete while new ones arrive, in seconds.",
    )
    hysteresis: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="Relative difference between the load and the target load of the current replicas "
        "within which their number does not change.",
    )
    max_upscale_factor: float | None = Field(
        None,
        gt=1,
        description="Maximum factor by which one step multiplies the number of replicas. None: no limit.",
    )
    max_downscale_factor: float | None = Field(
        None,
        gt=1,
        description="Maximum factor by which one step divides the number of replicas. None: no limit.",
    )
    dry_run: bool = Field(
        False, description="Whether decisions are only reported, in the log and the status, and not applied."
    )
    prometheus_address: Annotated[Secret | None, Masked(masked)] = Field(
        None,
        description="Address of a Prometheus server, such as ``http://prometheus:9090``, or a "
        "[reference](SECURITY.md#secrets) to it.",
    )
    prometheus_queries: dict[str, str] = Field(
        default_factory=dict, description="PromQL expressions by name. Each must have one value."
    )
    prometheus_interval_s: float = Field(5, ge=0.1, description="How often Prometheus is polled, in seconds.")
    prometheus_max_age_s: float = Field(
        15, gt=0, description="Age from which a value of Prometheus is stale, in seconds."
    )

    @model_validator(mode="before")
    @classmethod
    def _unpack_policy(cls, values: Any) -> Any:
        """Accept Ray Serve's ``policy={"policy_function": ..., "policy_kwargs": {...}}``, the name of its
        default policy, and its older names of options.
        """
        if not isinstance(values, Mapping):
            return values
        values = dict(values)
        for old, name in _OLD_NAMES.items():
            value = values.pop(old, None)
            if value is not None and values.get(name) is None:
                values[name] = value
        if isinstance(values.get("policy"), Mapping):
            policy = dict(values["policy"])
            older = policy.pop("name", cls.model_fields["policy"].default)
            values["policy"] = policy.pop("policy_function", older)
            if "policy_kwargs" in policy:
                values["policy_kwargs"] = policy.pop("policy_kwargs")
            if policy:
                raise ValueError(
                    f"policy has no option {min(map(str, policy))!r}; it takes policy_function and "
                    "policy_kwargs"
                )
        if values.get("policy") in RAY_DEFAULT_POLICIES:
            values["policy"] = cls.model_fields["policy"].default
        return values

    @field_validator("*")
    @classmethod
    def _is_finite(cls, value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{value} is not a finite number; give a finite one")
        return value

    @field_validator("policy")
    @classmethod
    def _is_a_policy(cls, value: Any) -> Any:
        if callable(value) or isinstance(value, bytes) or value in BUILT_IN_POLICIES:
            return value
        if not (isinstance(value, str) and all(split_import_path(value))):
            raise ValueError(
                f"policy is {value!r}; it must be one of {', '.join(BUILT_IN_POLICIES)}, an import path "
                '"module:function", or a function'
            )
        return value

    @model_validator(mode="after")
    def _bounds_agree(self) -> AutoscalingConfig:
        self._check_bounds()
        return self

    def _check_bounds(self) -> None:
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas={self.max_replicas} is less than min_replicas={self.min_replicas}; raise "
                "max_replicas or lower min_replicas"
            )
        unit = self.multiple_of
        least, most = share_of(self.min_replicas, None, unit), self.max_replicas // unit * unit
        if not 0 < most >= least:
            raise ValueError(
                f"no multiple of multiple_of={unit} lies between min_replicas={self.min_replicas} and "
                f"max_replicas={self.max_replicas}; make max_replicas {max(least, unit)} or more, or "
                "lower multiple_of"
            )
        first = self.initial_replicas
        if first is not None and not self.min_replicas <= first <= self.max_replicas:
            raise ValueError(
                f"initial_replicas={first} is not between min_replicas={self.min_replicas} and "
                f"max_replicas={self.max_replicas}; give a number between them, or omit it for min_replicas"
            )

    @model_validator(mode="after")
    def _policy_has_what_it_needs(self) -> AutoscalingConfig:
        if self.group is not None and self.policy in BUILT_IN_POLICIES:
            raise ValueError(
                f"policy {self.policy!r} decides for one backend at a time, so it cannot be used with "
                f"group={self.group!r}; omit group, or set policy to a function (or its import path) that "
                "takes {name: context} and returns {name: number}"
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

    def in_groups_of(self, size: int) -> AutoscalingConfig:
        """Return a copy for groups of another size; ``multiple_of`` is not marked as set in the copy.

        Raises
        ------
        ValueError
            No whole number of groups is within the bounds.
        """
        if size == self.multiple_of:
            return self
        copy = self.model_copy()
        vars(copy)["multiple_of"] = size
        copy._check_bounds()
        return copy

    def queue_options(self) -> QueueOptions | None:
        """Return the options of the broker's queue for the policy ``queue``; None for other policies."""
        return queue_options_of(self.policy, self.policy_kwargs)

    @property
    def up_factor(self) -> float:
        """The share of a wanted increase that one step applies."""
        return self.smoothing_factor if self.upscaling_factor is None else self.upscaling_factor

    @property
    def down_factor(self) -> float:
        """The share of a wanted decrease that one step applies."""
        return self.smoothing_factor if self.downscaling_factor is None else self.downscaling_factor

    @property
    def zero_delay_s(self) -> float:
        """How long a backend must be idle before its last replica stops, in seconds."""
        delay_s = self.downscale_to_zero_delay_s
        return self.downscale_delay_s if delay_s is None else delay_s

    @property
    def first_replicas(self) -> int:
        """The initial number of replicas."""
        return self.min_replicas if self.initial_replicas is None else self.initial_replicas

    @property
    def burst_s(self) -> float:
        """The window for bursts, in seconds; 0 for none. Setting ``upscale_delay_s`` turns bursts off."""
        if self.burst_window_s is not None:
            return self.burst_window_s
        return 0.0 if "upscale_delay_s" in self.model_fields_set else BURST_WINDOW_S

    def bounds(self, capacity: float | None = None, direction: str | None = None) -> Bounds:
        """Return the bounds of the number of replicas at a target capacity.

        While the capacity goes up, the initial number of replicas, if set, is the minimum.
        """
        unit = self.multiple_of
        most = share_of(self.max_replicas // unit * unit, capacity, unit)
        first = min(share_of(self.first_replicas, capacity, unit), most)
        is_held = direction == UP and self.initial_replicas is not None
        least = first if is_held else min(share_of(self.min_replicas, capacity, unit), most)
        return Bounds(least, most, first, unit, capacity)

    def warnings(self) -> list[str]:
        """Return warnings about valid options that are probably mistakes, each with a remedy."""
        found = []
        if self.policy == "classic" and self.upscale_delay_s < self.look_back_period_s:
            found.append(
                f"upscale_delay_s={shown(self.upscale_delay_s)} is less than look_back_period_s="
                f"{shown(self.look_back_period_s)}: the classic policy still counts the load from before a "
                "change and changes the number again; raise the delay, or use target_ongoing_requests"
            )
        if self.downscale_delay_s < self.look_back_period_s:
            found.append(
                f"downscale_delay_s={shown(self.downscale_delay_s)} is less than look_back_period_s="
                f"{shown(self.look_back_period_s)}: replicas stop in every short lull and have to start "
                "again; raise the delay or shorten the look-back period"
            )
        if self.smoothing_factor > 1 or self.up_factor > 1 or self.down_factor > 1:
            found.append("a factor above 1 overshoots and then scales back; set it to 1 or less")
        bounds = self.bounds()
        if bounds.least == bounds.most:
            found.append(
                f"min_replicas and max_replicas are both {bounds.most}, so there is nothing to scale; "
                "raise max_replicas"
            )
        return found
