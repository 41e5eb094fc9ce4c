"""The options of placement groups."""

from __future__ import annotations

from typing import Any

import pytest
from tables import each_case

import daskserve as serve
from daskserve.client.definitions.specs import make_spec
from daskserve.options.actor import ActorOptions
from daskserve.options.backend import BackendConfig

BUNDLES = [{"CPU": 1}, {"CPU": 2, "GPU": 1}]


class Model:
    def __call__(self) -> None: ...


@each_case(
    ("options", "message"),
    [
        ({"placement_group_bundles": []}, "there is no bundle"),
        ({"placement_group_bundles": [{}]}, "bundle 0 is {}; give an amount above 0"),
        ({"placement_group_bundles": [{"CPU": 1}, {"CPU": 0}]}, "bundle 1 is .*; give an amount above 0"),
        ({"placement_group_bundles": [{"CPU": -1}]}, "bundle 0 has the amount -1.0 of 'CPU'"),
        ({"placement_group_bundles": [{"CPU": float("inf")}]}, "a finite number, 0 or more"),
        (
            {"placement_group_bundles": [{"CPU": 1, "num_gpus": 1}]},
            "bundle 0 has 'num_gpus'; in a bundle, the resource is 'GPU'",
        ),
        ({"placement_group_bundles": BUNDLES, "placement_group_strategy": "NEAR"}, "STRICT_SPREAD"),
        (
            {"placement_group_bundles": BUNDLES, "max_replicas_per_node": 1},
            "max_replicas_per_node=1 is given together with placement_group_bundles",
        ),
        (
            {
                "placement_group_bundles": BUNDLES,
                "placement_group_strategy": "SPREAD",
                "num_replicas": 2,
                "gang_scheduling_config": {"gang_size": 2},
            },
            "whose gang_placement_strategy places all bundles of a gang",
        ),
        (
            {"placement_group_bundle_label_selector": [{}]},
            "no labels; declare a resource .*, and ask for it in",
        ),
        ({"placement_group_fallback_strategy": [{}]}, "no labels; list all suitable workers"),
        (
            {"placement_group_bundles": [{"GPU": 1}]},
            r"bundles\[0\] is {'GPU': 1.0}, but the replica runs in it and its actor_options need 0\.1 of",
        ),
        (
            {"placement_group_bundles": BUNDLES, "actor_options": {"num_cpus": 2}},
            "need 2 of 'CPU'; increase the first bundle",
        ),
        (
            {"placement_group_bundles": BUNDLES, "ray_actor_options": {"resources": {"license": 1}}},
            "need 1 of 'license'",
        ),
        (
            {"ray_actor_options": {"placement_group_bundles": BUNDLES}},
            "no option 'placement_group_bundles'. It belongs in config",
        ),
    ],
)
def test_invalid_placement_groups_are_refused_where_they_are_written(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        serve.deployment(**options)(Model)
    with pytest.raises(ValueError, match=message):
        serve.deployment(Model).options(**options)


def test_a_bundle_that_covers_the_replica_is_allowed_and_later_changes_are_checked() -> None:
    made = serve.deployment(
        placement_group_bundles=BUNDLES, ray_actor_options={"num_cpus": 1}, placement_group_strategy="SPREAD"
    )(Model)
    assert made.config.placement_group_bundles == BUNDLES
    assert made.config.strategy == "SPREAD"
    with pytest.raises(ValueError, match="need 1 of 'GPU'"):
        made.options(ray_actor_options={"num_gpus": 1})
    with pytest.raises(ValueError, match="is given without placement_group_bundles"):
        made.options(placement_group_bundles=None).bind()
    bare = made.options(placement_group_bundles=None, placement_group_strategy=None)
    assert bare.config.fixed() == {}


def test_the_classic_verbs_check_it_too() -> None:
    with pytest.raises(ValueError, match=r"need 0\.1 of 'CPU'"):
        make_spec(
            "b",
            Model,
            (),
            {},
            actor_options=None,
            config={"placement_group_bundles": [{"GPU": 1}]},
            timeout_s=None,
        )


def test_without_a_strategy_bundles_are_packed_and_a_gang_has_its_own() -> None:
    config = BackendConfig(placement_group_bundles=BUNDLES)
    assert config.strategy == "PACK"
    assert BackendConfig(**config.to_plain()) == config
    assert config.fixed() == {"placement_group_bundles": BUNDLES}
    gang = {"gang_size": 2, "gang_placement_strategy": "SPREAD"}
    both = BackendConfig(num_replicas=2, placement_group_bundles=BUNDLES, gang_scheduling_config=gang)
    assert both.strategy == "SPREAD"
    assert ActorOptions().demand() == {"CPU": 0.1}
