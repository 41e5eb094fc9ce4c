"""Scaling of several backends together on a real cluster: groups and the target capacity of an instance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from clusters import running
from dask_processes import PATIENCE_S, ExternalCluster, fetch, poll_for

import daskserve as serve

QUICK: dict[str, Any] = {
    "min_replicas": 1,
    "max_replicas": 8,
    "upscale_delay_s": 0.5,
    "downscale_delay_s": 1.0,
    "look_back_period_s": 1.0,
    "metrics_interval_s": 0.2,
}


def answer(request: Any = None) -> str:
    return "done"


def as_told(file: Path) -> Any:
    """Return a policy that reads the target of ``a`` from a file and wants twice as many of ``b``."""

    def decide(contexts: Mapping[str, Any]) -> dict[str, int]:
        wanted = int(file.read_text())
        return {"a": wanted, "b": 2 * wanted} if len(contexts) == 2 else {}

    return decide


def counts(client: serve.Client) -> tuple[int, int]:
    return len(running(client, "a")), len(running(client, "b"))


def test_two_backends_are_scaled_by_one_policy(client: serve.Client, tmp_path: Path) -> None:
    file = tmp_path / "wanted"
    file.write_text("2")
    policy = as_told(file)
    for tag in "ab":
        config = {**QUICK, "group": "pair", "policy": policy}
        client.create_backend(tag, answer, config={"autoscaling_config": config})

    def explanation() -> str:
        return f"{client.explain('a')}\n{client.explain('b')}"

    for wanted in (2, 4, 1):
        file.write_text(str(wanted))
        poll_for(lambda wanted=wanted: counts(client) == (wanted, 2 * wanted), what=explanation)
    assert "of group 'pair'" in explanation()
    file.write_text("many")
    poll_for(lambda: "the policy failed: ValueError" in explanation(), what=explanation)
    assert counts(client) == (1, 2)
    # A backend that leaves the group is scaled separately, and the other one alone.
    client.update_backend_config("b", {"autoscaling_config": {**QUICK, "min_replicas": 3}})
    poll_for(lambda: counts(client) == (1, 3), what=explanation)
    assert client.explain("b").group == ""


def test_the_target_capacity_scales_all_backends(client: serve.Client, url: str) -> None:
    client.create_backend("fixed", answer, config={"num_replicas": 5})
    client.create_endpoint("e", backend="fixed", route="/e")
    config = {**QUICK, "min_replicas": 2, "multiple_of": 2}
    client.create_backend("scaled", answer, config={"autoscaling_config": config})

    def both() -> tuple[int, int]:
        return len(running(client, "fixed")), len(running(client, "scaled"))

    def status() -> str:
        return str(client.status())

    assert both() == (5, 2)
    client.set_target_capacity(50)
    poll_for(lambda: both() == (3, 2), what=status)
    assert fetch(f"{url}/e").status == 200
    assert "target capacity of 50 %, DOWN" in str(client.explain("fixed"))
    client.set_target_capacity(0)
    poll_for(lambda: both() == (0, 0), what=status)
    found = fetch(f"{url}/e")
    assert found.status == 503
    assert b"the target capacity of its instance is 0 %" in found.body
    with pytest.raises(serve.errors.UnavailableError, match="target capacity"):
        client.get_handle("e").remote().result(PATIENCE_S)
    assert {each.status for each in client.status().backends.values()} == {"HEALTHY"}
    client.set_target_capacity(100)
    assert fetch(f"{url}/e").status == 200
    poll_for(lambda: both() == (5, 2), what=status)
    client.set_target_capacity(None)
    assert (client.status().target_capacity, client.status().target_capacity_direction) == (None, None)
    assert client.get_backend_config("fixed").num_replicas == 5


@pytest.mark.parametrize("percent", [-1, 101, math.nan, "50", True])
def test_an_invalid_percentage_is_refused(client: serve.Client, percent: Any) -> None:
    with pytest.raises(ValueError, match="give a percentage from 0 to 100, or None for all"):
        client.set_target_capacity(percent)
    assert client.status().target_capacity is None


def test_the_capacity_outlives_the_instance_on_a_durable_store(
    external: ExternalCluster, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "dask_client": external.client,
        "http_options": {"port": 0},
        "store": f"sqlite:///{tmp_path}/serve.db",
        "name": "kept",
    }
    with serve.start(**options) as client:
        client.create_backend("b", answer, config={"num_replicas": 4})
        client.set_target_capacity(50)
        poll_for(lambda: len(running(client, "b")) == 2)
    with serve.start(**options) as client:
        assert (client.status().target_capacity, client.status().target_capacity_direction) == (50.0, "DOWN")
        poll_for(lambda: len(running(client, "b")) == 2)
        client.set_target_capacity(None)
        poll_for(lambda: len(running(client, "b")) == 4)
        client.delete_backend("b")
