"""The options of gangs."""

from __future__ import annotations

from typing import Any

import pytest
from tables import each_case

from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.options.backend import BackendConfig
from daskserve.options.placement import GangSchedulingConfig

PAIRS = {"gang_size": 2}


@each_case(
    ("options", "message"),
    [
        ({"num_replicas": 3}, "num_replicas=3 must be a multiple of gang_size=2; the next one is 4"),
        (
            {"autoscaling_config": {"min_replicas": 2, "max_replicas": 8, "multiple_of": 3}},
            "multiple_of=3, which must be a multiple of gang_size=2; set multiple_of=2",
        ),
        ({"autoscaling_config": {"max_replicas": 1}}, "no multiple of multiple_of=2 lies between"),
    ],
)
def test_the_number_of_replicas_is_one_of_whole_gangs(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BackendConfig(**options, gang_scheduling_config=PAIRS)


def test_whole_gangs_are_allowed() -> None:
    assert BackendConfig(num_replicas=4, gang_scheduling_config=PAIRS).num_replicas == 4
    scaling = {"min_replicas": 2, "max_replicas": 8, "multiple_of": 4}
    BackendConfig(autoscaling_config=scaling, gang_scheduling_config=PAIRS)
    with pytest.raises(ValueError, match="must be a multiple of gang_size=2"):
        BackendConfig(num_replicas=4, gang_scheduling_config=PAIRS).merged(BackendConfig(num_replicas=3))


def test_the_size_of_a_gang_is_the_default_of_multiple_of() -> None:
    def size_of(config: BackendConfig) -> int:
        assert config.autoscaling_config is not None
        return config.autoscaling_config.multiple_of

    config = BackendConfig(num_replicas="auto", gang_scheduling_config=PAIRS)  # type: ignore[arg-type]
    assert size_of(config) == 2
    assert size_of(BackendConfig(**config.to_plain())) == 2
    assert size_of(config.merged(BackendConfig(gang_scheduling_config={"gang_size": 3}))) == 3  # type: ignore[arg-type]
    assert size_of(config.merged(BackendConfig(gang_scheduling_config=None))) == 1
    given = {"min_replicas": 1, "max_replicas": 5}
    scaling = AutoscalingConfig(**given)  # type: ignore[arg-type]
    later = BackendConfig(gang_scheduling_config=PAIRS).merged(BackendConfig(autoscaling_config=scaling))
    assert size_of(later) == 2
    assert scaling.multiple_of == 1


def test_the_options_of_a_gang_are_checked() -> None:
    with pytest.raises(NotImplementedError, match="a gang restarts as a whole"):
        GangSchedulingConfig(gang_size=2, runtime_failure_policy="RESTART_REPLICA")
    with pytest.raises(ValueError, match="gang_size"):
        GangSchedulingConfig(gang_size=0)
    with pytest.raises(ValueError, match="gang_placement_strategy"):
        GangSchedulingConfig(gang_size=2, gang_placement_strategy="NEAR")


def test_a_gang_can_be_distinguished_in_plain_values() -> None:
    config = BackendConfig(num_replicas=2, gang_scheduling_config=PAIRS)
    assert BackendConfig(**config.to_plain()) == config
    assert config.fixed() == {"gang_scheduling_config": PAIRS}
