"""Deployments and applications before they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cases import for_each

import daskserve as serve
from daskserve.common.types import SHARED_BYTES
from daskserve.payload.pickling import dump_bytes, load_bytes
from daskserve.testing import local_instance


@serve.deployment
class Echo:
    def __call__(self, value: Any) -> Any:
        return value


@serve.deployment
class Caller:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args

    def __call__(self, value: Any) -> Any:
        return value


@for_each(
    "bind",
    [
        lambda other: Caller.bind(other),
        lambda other: Caller.bind(1, echo=other),
        lambda other: Caller.bind([{"echo": (other,)}]),
    ],
)
def test_bind_rejects_a_deployment_that_is_not_bound(bind: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"'Caller' has the deployment 'Echo' .* pass Echo.bind\(...\)"):
        bind(Echo)


def test_large_arguments_arrive_read_only_at_every_replica() -> None:
    class First:
        def __init__(self, array: Any) -> None:
            self.array = array

        def __call__(self) -> tuple[int, bool]:
            return len(self.array), self.array.flags.writeable

    with local_instance(http_options={"location": "NoServer"}) as client:
        client.deploy("first", First, np.zeros(SHARED_BYTES, np.uint8))
        assert client.get_handle("first").remote().result(10) == (SHARED_BYTES, False)
        client.update_backend_config("first", {"num_replicas": 3})
        assert client.get_handle("first").remote().result(10) == (SHARED_BYTES, False)


def test_other_arguments_do_not_change() -> None:
    contains_itself: list[Any] = []
    contains_itself.append(contains_itself)
    application = Caller.bind(contains_itself, range(10**12), a={"b": "c"})
    assert application.args[0] is contains_itself
    assert application.kwargs == {"a": {"b": "c"}}


@for_each(("path", "concurrency"), [("asyncio.sleep", 100), ("os.path.basename", 8)])
def test_the_concurrency_of_an_import_path_fits_what_it_names(path: str, concurrency: int) -> None:
    with local_instance(http_options={"location": "NoServer"}) as client:
        client.create_backend("b", path)
        assert client.get_backend_config("b").max_concurrent_queries == concurrency


def test_deploy_takes_the_options_of_the_actor_under_ray_serves_name() -> None:
    def nothing() -> None: ...

    with local_instance() as client:
        client.deploy("d", nothing, ray_actor_options={"num_cpus": 0.5})
        assert client.get_deployment_info("d")[0].actor_options["num_cpus"] == 0.5
        with pytest.raises(ValueError, match="another spelling of actor_options"):
            client.deploy("d", nothing, ray_actor_options={}, actor_options={})


def test_the_options_of_a_deployment_are_attributes_under_all_names() -> None:
    made = serve.deployment(max_ongoing_requests=7, graceful_shutdown_timeout_s=3, num_replicas=2)(
        Caller.definition
    )
    assert made.max_ongoing_requests == made.max_concurrent_queries == 7
    assert made.graceful_shutdown_timeout_s == made.experimental_graceful_shutdown_timeout_s == 3
    assert (made.num_replicas, made.max_queued_requests, made.user_config) == (2, 1000, None)
    assert (made.autoscaling_config, made.gang_scheduling_config, made.deployment_actors) == (None, None, ())
    scaled = made.options(num_replicas="auto")
    assert scaled.autoscaling_config.max_replicas == 100
    for each in (made, load_bytes(dump_bytes(made))):
        with pytest.raises(AttributeError, match="no attribute 'max_replica'"):
            _ = each.max_replica
