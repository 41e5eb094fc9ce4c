"""The options of autoscaling: defaults, spellings and invalid values."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
from tables import each_case

from daskserve.options.autoscaling import AutoscalingConfig


def test_defaults_are_as_documented() -> None:
    found = AutoscalingConfig()
    assert (found.min_replicas, found.initial_replicas, found.max_replicas) == (1, None, 1)
    assert (found.target_ongoing_requests, found.look_back_period_s, found.smoothing_factor) == (2, 30, 1)
    assert (found.upscale_delay_s, found.downscale_delay_s, found.downscale_to_zero_delay_s) == (
        30,
        600,
        None,
    )
    assert (found.upscaling_factor, found.downscaling_factor) == (None, None)
    assert found.aggregation_function == "mean"


def test_the_classic_spelling_and_a_nested_policy_are_accepted() -> None:
    assert AutoscalingConfig(**{"target_num_ongoing_requests_per_replica": 5}).target_ongoing_requests == 5
    found = AutoscalingConfig(policy={"policy_function": "a.b:c", "policy_kwargs": {"d": 1}})
    assert (found.policy, found.policy_kwargs) == ("a.b:c", {"d": 1})


@each_case(
    ("options", "message"),
    [
        (
            {"min_replicas": 5, "max_replicas": 2},
            "max_replicas=2 is less than min_replicas=5; raise max_replicas",
        ),
        ({"min_replicas": 2, "max_replicas": 4, "initial_replicas": 5}, "initial_replicas=5 is not between"),
        ({"min_replicas": 2, "max_replicas": 4, "initial_replicas": 1}, "initial_replicas=1 is not between"),
        ({"min_replicas": -1}, "min_replicas"),
        ({"max_replicas": 0}, "max_replicas"),
        ({"upscale_delay_s": -1}, "upscale_delay_s"),
        ({"downscale_delay_s": -0.1}, "downscale_delay_s"),
        ({"downscale_to_zero_delay_s": -1}, "downscale_to_zero_delay_s"),
        ({"target_ongoing_requests": 0}, "target_ongoing_requests"),
        ({"look_back_period_s": 0}, "look_back_period_s"),
        ({"metrics_interval_s": 0}, "metrics_interval_s"),
        ({"smoothing_factor": -1}, "smoothing_factor"),
        ({"upscaling_factor": 0}, "upscaling_factor"),
        ({"target_ongoing_requests": math.inf}, "give a finite one"),
        ({"upscale_delay_s": math.nan}, "upscale_delay_s"),
        ({"aggregation_function": "median"}, "aggregation_function"),
        ({"policy": "fastest"}, "it must be one of target_ongoing_requests, classic, latency"),
        ({"policy": 7}, "it must be one of"),
        ({"policy": {"function": "a:b"}}, "policy has no option 'function'"),
        ({"policy": "promql"}, "needs prometheus_address"),
        ({"multiple_of": 0}, "multiple_of"),
        (
            {"multiple_of": 4, "max_replicas": 3},
            "no multiple of multiple_of=4 lies between .* make max_replicas 4 or more",
        ),
        (
            {"multiple_of": 4, "min_replicas": 5, "max_replicas": 7},
            "multiple_of=4 lies between min_replicas=5 and max_replicas=7; make max_replicas 8 or more",
        ),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_invalid_options_are_refused_with_name_and_value(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AutoscalingConfig(**options)


def test_assignments_are_validated() -> None:
    found = AutoscalingConfig(max_replicas=3)
    with pytest.raises(ValueError, match="max_replicas=3 is less than min_replicas=4"):
        found.min_replicas = 4


def test_warnings_name_the_values_and_the_remedy() -> None:
    assert AutoscalingConfig(max_replicas=9).warnings() == []
    classic = AutoscalingConfig(max_replicas=9, policy="classic", upscale_delay_s=5).warnings()
    assert len(classic) == 1
    assert "upscale_delay_s=5 is less than look_back_period_s=30" in classic[0]
    assert "nothing to scale" in AutoscalingConfig(max_replicas=1).warnings()[0]
    assert "both 4, so there is nothing" in AutoscalingConfig(max_replicas=7, multiple_of=4).warnings()[0]


def test_the_policy_context_does_not_import_pydantic() -> None:
    code = "import sys, daskserve.autoscaling; sys.exit('pydantic' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
