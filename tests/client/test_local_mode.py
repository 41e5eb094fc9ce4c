"""Applications in this process: `serve.run(..., local=True)`."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import dask
import httpx
import pytest
from tables import each_case

import daskserve as serve
from daskserve.errors import (
    AlreadyRegisteredError,
    BadRequestError,
    NotFoundError,
    NotRunningError,
    ReplicaStartError,
)
from daskserve.testing import local_instance


def poll_for(condition: Callable[[], Any], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    serve.shutdown()
    assert set(threading.enumerate()) <= before


@serve.deployment
class Adder:
    def __init__(self, more: int = 1) -> None:
        self.more, self.calls = more, 0

    def __call__(self, number: int) -> int:
        self.calls += 1
        return number + self.more

    def count(self) -> int:
        return self.calls

    def numbers(self, end: int) -> Iterator[int]:
        yield from range(end)


@serve.deployment
class Caller:
    def __init__(self, *handles: serve.Handle, name: str = "") -> None:
        self.handles, self.name = handles, name

    async def __call__(self, number: int) -> list[int]:
        return [await each.remote(number) for each in self.handles]

    async def total(self, end: int) -> int:
        return sum([each async for each in self.handles[0].numbers.options(stream=True).remote(end)])

    async def raising(self) -> None:
        raise KeyError(self.name)

    def own(self, name: str) -> int:
        return serve.get_deployment_handle(name).remote(0).result()

    def other(self, name: str) -> Any:
        return serve.get_app_handle(name).remote(0).result()


def test_an_application_runs_in_this_process() -> None:
    adder = Adder.bind(10)
    handle = serve.run(Caller.bind(adder, Adder.bind(20), adder), local=True)
    assert handle.remote(1).result(10) == [11, 21, 11]
    assert handle.total.remote(5).result(10) == 10
    assert serve.get_deployment_handle("Adder", "default").count.remote().result(10) == 2
    with pytest.raises(KeyError, match="boom"):
        serve.run(Caller.bind(name="boom"), name="b", route_prefix=None, local=True).raising.remote().result(
            10
        )


def test_handles_work_in_any_event_loop() -> None:
    async def scenario() -> None:
        handle = await serve.run_async(Caller.bind(Adder.bind()), local=True)
        assert await handle.remote(1) == [2]
        assert serve.get_app_handle() is not None
        adder = await serve.get_deployment_handle_async("Adder", "default")
        found: AsyncIterator[int] = adder.numbers.options(stream=True).remote(3)
        assert [each async for each in found] == [0, 1, 2]
        await serve.shutdown_async()

    asyncio.run(scenario())


def test_running_it_again_changes_nothing_and_another_one_replaces_it() -> None:
    handle = serve.run(Caller.bind(Adder.bind()), local=True)
    handle.remote(1).result(10)
    serve.run(Caller.bind(Adder.bind()), _local_testing_mode=True)
    adder = serve.get_deployment_handle("Adder", "default")
    assert adder.count.remote().result(10) == 1
    assert serve.run(Caller.bind(Adder.options(name="Other").bind(5)), local=True).remote(1).result(10) == [6]
    with pytest.raises(NotFoundError, match="Deployment 'Adder' in application 'default' does not exist"):
        serve.get_deployment_handle("Adder", "default")


class Late:
    def __init__(self, gate: Path) -> None:
        poll_for(gate.exists)

    def __call__(self) -> str:
        return "up"


@pytest.mark.parametrize("run", [serve.run, serve._run])
def test_with_ray_serves_private_argument_a_call_returns_at_once(run: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    handle = run(serve.deployment(Late).bind(gate), local=True, _blocking=False)
    assert serve.status().applications["default"].status in ("NOT_STARTED", "DEPLOYING")
    gate.touch()
    assert handle.remote().result(10) == "up"
    serve.delete("default", _blocking=False)
    poll_for(lambda: not serve.status().applications)


def test_applications_of_one_deployment_name_are_apart() -> None:
    one, two = serve.run_many(
        [
            serve.RunTarget(Caller.bind(Adder.bind(1)), name="one", route_prefix="/one"),
            serve.RunTarget(Caller.bind(Adder.bind(2)), name="two", route_prefix="/two"),
        ],
        local=True,
    )
    assert (one.remote(0).result(10), two.remote(0).result(10)) == ([1], [2])
    assert (one.own.remote("Adder").result(10), two.own.remote("Adder").result(10)) == (1, 2)
    assert one.other.remote("two").result(10) == [2]
    serve.delete("one")
    serve.delete("one")
    with pytest.raises(NotFoundError, match="Application 'one' does not exist"):
        serve.get_app_handle("one")
    assert two.remote(0).result(10) == [2]


@each_case("name", ["handle", "status", "delete", "shutdown"])
def test_without_an_instance_lookups_fail_and_the_rest_does_nothing(name: str) -> None:
    if name == "handle":
        with pytest.raises(NotRunningError):
            serve.get_app_handle()
    elif name == "status":
        assert serve.status().instance == ""
    elif name == "delete":
        serve.delete("default")
    else:
        serve.shutdown()


def test_an_error_of_a_constructor_is_raised_at_once_and_leaves_nothing() -> None:
    class Broken:
        def __init__(self, adder: serve.Handle) -> None:
            raise ValueError("no weights")

        def __call__(self) -> None: ...

    with pytest.raises(ReplicaStartError, match=r"Deploying application 'default' failed: .*no weights"):
        serve.run(serve.deployment(Broken).bind(Adder.bind()), local=True)
    poll_for(lambda: serve.status().backends == {})


def test_a_mistake_starts_nothing() -> None:
    before = threading.enumerate()
    with pytest.raises(BadRequestError, match="cannot be pickled"):
        serve.run(Adder.bind(threading.Lock()), local=True)
    for targets, error in (
        ([], "No applications provided"),
        ([serve.RunTarget(Adder.bind()), serve.RunTarget(Adder.bind())], "Two applications have the name"),
        ([serve.RunTarget(Adder.bind(), route_prefix="a")], "must start with '/'"),
    ):
        with pytest.raises(BadRequestError, match=error):
            serve.run_many(targets, local=True)
    with pytest.raises(TypeError, match=r"takes serve\.RunTarget"):
        serve.run_many([Adder.bind()], local=True)  # type: ignore[list-item]
    assert threading.enumerate() == before


def test_a_route_of_another_application_is_refused() -> None:
    serve.run(Adder.bind(), local=True)
    with pytest.raises(AlreadyRegisteredError, match="in use by application 'default'"):
        serve.run(Adder.bind(), name="other", local=True)
    with pytest.raises(NotFoundError):
        serve.get_app_handle("other")


def test_a_handle_of_a_deployment_that_goes_is_refused() -> None:
    """Running the default application again would remove the handle's deployment."""
    handle = serve.run(Adder.bind(1), local=True)

    class Uses:
        def __call__(self, number: int) -> int:
            return handle.remote(number).result()

    for target in (Caller.bind(handle), serve.deployment(Uses).bind()):
        with pytest.raises(
            BadRequestError, match=r"refers to a handle of 'Adder'.*Pass the bound deployment"
        ):
            serve.run(target, local=True)
    assert handle.remote(1).result(10) == 2
    other = serve.run(serve.deployment(Uses).bind(), name="other", route_prefix=None, local=True)
    assert other.remote(2).result(10) == 3


def test_options_about_places_are_ignored() -> None:
    adder = Adder.options(
        config={"num_replicas": 3, "isolation": "process"}, actor_options={"num_gpus": 2}, env="/missing"
    )
    with pytest.warns(UserWarning, match="runs locally without its environment and num_gpus"):
        handle = serve.run(adder.bind(2), local=True)
    assert handle.remote(1).result(10) == 3
    assert serve.status().backends["Adder"].wanted == 1


def test_dasks_configuration_can_make_it_the_default() -> None:
    with dask.config.set({"daskserve.local-testing-mode": True}):
        assert serve.run(Adder.bind()).remote(1).result(10) == 2
    assert serve.connect().scheduler_address == "local"


def test_a_builder_is_run_with_its_arguments() -> None:
    def builder(args: dict[str, int]) -> serve.Application:
        return Adder.bind(args["more"])

    assert serve.run(builder, args={"more": 7}, local=True).remote(0).result(10) == 7


@serve.deployment
class Page:
    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self, request: Any) -> str:
        return self.text


def test_a_client_runs_applications_side_by_side_over_http() -> None:
    with local_instance(http_options={"port": 0}) as client:
        (url,) = client.http_urls()
        client.run(Page.bind("one"), name="one", route_prefix="/one")
        client.run(Page.bind("root"))
        client.run(Page.bind("hidden"), name="hidden", route_prefix=None)
        assert [httpx.get(f"{url}{path}").text for path in ("/one", "/", "/hidden")] == [
            "one",
            "root",
            "root",
        ]
        client.delete_application("default")
        assert [httpx.get(f"{url}{path}").status_code for path in ("/one", "/")] == [200, 404]


def test_a_handle_in_a_forked_process_says_that_it_has_no_connection() -> None:
    handle = serve.run(Adder.bind(), local=True)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        with suppress(BaseException):
            try:
                handle.remote(1).result(timeout_s=5)
            except serve.errors.ServeError as error:
                os.write(writing, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with open(reading) as pipe:
        assert "This process was forked" in pipe.read()
    assert handle.remote(1).result(timeout_s=5) == 2
