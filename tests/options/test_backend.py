"""Options of backends: valid and invalid ways to set the number of replicas."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
from pydantic import ValidationError
from tables import each_case

import daskserve as serve
from daskserve.client.definitions.specs import join_config, split_config
from daskserve.errors import BadRequestError
from daskserve.options.actor import ActorOptions
from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.options.backend import AUTO_MAX_REPLICAS, BackendConfig, BackendMetadata
from daskserve.payload.pickling import load_bytes

pytestmark = pytest.mark.smoke

FIVE = {"max_replicas": 5}


def autoscaling_of(**options: Any) -> AutoscalingConfig:
    found = BackendConfig(**options).autoscaling_config
    assert found is not None
    return found


@each_case(
    ("options", "bounds"),
    [
        ({"num_replicas": "auto"}, (1, AUTO_MAX_REPLICAS)),
        ({"num_replicas": "auto", "autoscaling_config": FIVE}, (1, 5)),
        ({"num_replicas": "auto", "autoscaling_config": AutoscalingConfig(min_replicas=1)}, (1, 100)),
        ({"autoscaling_config": FIVE}, (1, 5)),
        ({"internal_metadata": {"autoscaling_config": FIVE}}, (1, 5)),
        ({"internal_metadata": BackendMetadata(autoscaling_config=FIVE)}, (1, 5)),
    ],
)
def test_autoscaling_can_be_requested_in_several_ways(
    options: dict[str, Any], bounds: tuple[int, int]
) -> None:
    found = autoscaling_of(**options)
    assert (found.min_replicas, found.max_replicas) == bounds


def test_the_classic_name_of_the_target_is_accepted() -> None:
    metadata = {"autoscaling_config": {"target_num_ongoing_requests_per_replica": 7}}
    assert autoscaling_of(internal_metadata=metadata).target_ongoing_requests == 7


@each_case(
    ("options", "match"),
    [
        ({"num_replicas": 2, "autoscaling_config": FIVE}, "num_replicas=2 cannot be combined with"),
        ({"num_replicas": 0}, "greater than or equal to 1"),
        ({"num_replicas": 2**63}, "less than or equal to 9223372036854775807"),
        ({"max_body_bytes": "1e30 GB"}, "max_body_bytes\n.*less than or equal to 9223372036854775807"),
        ({"autoscaling_config": {"max_replicas": 10**40}}, "autoscaling_config.max_replicas\n.*less than"),
        ({"num_replicas": "many"}, "num_replicas"),
        ({"autoscaling_config": {"max_replicas": 0}}, "max_replicas"),
        ({"autoscaling_config": {"most_replicas": 1}}, "most_replicas"),
        ({"num_replicas": "auto", "autoscaling_config": 7}, "autoscaling_config"),
        ({"rollout": {"compare": functools.partial(print, 1)}}, "move the function into a module"),
    ],
)
def test_invalid_options_are_refused_by_name(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        BackendConfig(**options)


def test_a_user_config_may_be_any_number() -> None:
    assert BackendConfig(user_config=2**70).user_config == 2**70


@each_case(
    ("options", "match"),
    [
        (
            {"resources": {"GPU": math.nan}},
            "resource 'GPU' has the amount nan; give a finite number, 0 or more",
        ),
        (
            {"resources": {"GPU": math.inf}},
            "resource 'GPU' has the amount inf; give a finite number, 0 or more",
        ),
        ({"resources": {"": 1}}, "a resource with the amount 1.0 has no name"),
        ({"num_cpus": math.inf}, "num_cpus\n.*finite number"),
        ({"num_gpus": math.inf}, "num_gpus\n.*finite number"),
        ({"workers": []}, "there are no workers; give at least one, or None"),
    ],
)
def test_resources_that_no_worker_could_have_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        ActorOptions(**options)


def test_a_dry_run_can_be_combined_with_a_fixed_number() -> None:
    config = BackendConfig(num_replicas=3, autoscaling_config={**FIVE, "dry_run": True})  # type: ignore[arg-type]
    assert config.num_replicas == 3


def test_autoscaling_and_a_fixed_number_replace_each_other() -> None:
    by_hand, scaled = BackendConfig(num_replicas=3), BackendConfig(num_replicas="auto")  # type: ignore[arg-type]
    assert by_hand.merged(scaled).autoscaling_config is not None
    assert "num_replicas" not in by_hand.merged(scaled).model_fields_set
    with pytest.raises(ValidationError, match="cannot be combined with"):
        scaled.merged(by_hand)
    back = scaled.merged(BackendConfig(num_replicas=3, autoscaling_config=None))
    assert (back.num_replicas, back.autoscaling_config) == (3, None)


def test_a_deployment_accepts_the_same_options() -> None:
    @serve.deployment(num_replicas="auto")
    def double(x: int) -> int:
        return 2 * x

    assert double.config.autoscaling_config is not None
    scaled = double.options(autoscaling_config=FIVE)
    assert scaled.config.autoscaling_config == AutoscalingConfig(max_replicas=5)


def test_a_function_is_sent_as_bytes_that_only_the_controller_unpickles() -> None:
    def two(context: serve.autoscaling.AutoscalingContext) -> int:
        return 2

    sealed, user_config = split_config(BackendConfig(autoscaling_config={"policy": two}))  # type: ignore[arg-type]
    assert sealed.autoscaling_config is not None
    data = sealed.autoscaling_config.policy
    assert load_bytes(data)(None) == 2
    found = join_config({"config": sealed.to_plain(), "user_config": user_config})
    assert found.autoscaling_config is not None
    assert found.autoscaling_config.policy == data
    assert found.internal_metadata.autoscaling_config is not None


def test_a_function_that_cannot_be_pickled_is_refused() -> None:
    items = (each for each in [1, 2])

    def locked(context: serve.autoscaling.AutoscalingContext) -> int:
        return next(items)

    with pytest.raises(BadRequestError, match=r"policy cannot be pickled.*'items' is of type generator"):
        split_config(BackendConfig(autoscaling_config={"policy": locked}))  # type: ignore[arg-type]


@each_case(
    ("max_surge", "replicas", "surge"),
    [(0, 5, 0), (3, 1, 3), ("25%", 4, 1), ("25%", 5, 2), ("0%", 5, 0), ("120.5 %", 10, 13), ("10%", 10, 1)],
)
def test_the_surge_is_a_number_or_a_percentage_rounded_up(
    max_surge: int | str, replicas: int, surge: int
) -> None:
    assert BackendConfig(max_surge=max_surge).surge(replicas) == surge


@each_case(
    ("options", "surge", "unavailable"),
    [
        ({}, 1, 0),
        ({"max_unavailable": 2}, 1, 2),
        ({"max_unavailable": "34%"}, 1, 1),
        ({"max_unavailable": "33%"}, 1, 0),
        ({"rolling_update_percentage": 1 / 3}, 1, 1),
        ({"rolling_update_percentage": 1, "max_surge_percent": 0}, 0, 3),
        ({"max_surge_percent": 33.4}, 2, 0),
    ],
)
def test_max_unavailable_is_rounded_down_and_takes_percentages(
    options: dict[str, Any], surge: int, unavailable: int
) -> None:
    config = BackendConfig(**options)
    assert (config.surge(3), config.unavailable(3)) == (surge, unavailable)
    again = BackendConfig(**config.to_plain())
    assert again == config
    assert config.merged(BackendConfig(num_replicas=3)).max_unavailable == config.max_unavailable


@each_case(("retries", "replicas", "failures"), [(20, 1, 3), (20, 7, 20), (2, 7, 2), (20, 0, 3)])
def test_a_change_fails_after_the_given_number_of_starts_but_three_for_each_replica(
    retries: int, replicas: int, failures: int
) -> None:
    assert BackendConfig(max_constructor_retry_count=retries).allowed_failures(replicas) == failures


@each_case("max_surge", [-1, True, 1.5, "1", "-5%", "%", "1e3%", "9" * 400 + "%", None])
def test_any_other_surge_is_refused(max_surge: Any) -> None:
    with pytest.raises(ValidationError, match=r'a whole number from 0 on, or a percentage such as "25%"'):
        BackendConfig(max_surge=max_surge)


def test_whole_floats_are_whole_numbers() -> None:
    config = BackendConfig(
        num_replicas=2.0,  # type: ignore[arg-type]
        max_batch_size=8.0,  # type: ignore[arg-type]
        max_surge=1.0,  # type: ignore[arg-type]
        max_unavailable=1.0,  # type: ignore[arg-type]
    )
    found = (config.num_replicas, config.max_batch_size, config.max_surge, config.max_unavailable)
    assert found == (2, 8, 1, 1)
    assert {type(each) for each in found} == {int}
