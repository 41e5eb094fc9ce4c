"""The classic system's functions, and the classic verbs of deployments."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from tables import each_case

import daskserve as serve
from daskserve.client.verbs.stored_code import StoredCode
from daskserve.common.types import SHARED_BYTES
from daskserve.data.caller.calls.async_handle import AsyncHandle
from daskserve.errors import (
    BadRequestError,
    BlockingCallError,
    InstanceError,
    NotFoundError,
    NotRunningError,
    ReplicaStartError,
)
from daskserve.loops.blocking import finish
from daskserve.payload.parcels import pack_code
from daskserve.payload.pickling import dump_bytes, load_bytes
from daskserve.testing import local_instance_async


@serve.deployment
def nothing() -> None: ...


@pytest.fixture
def instance() -> Iterator[None]:
    """The module-level functions use an instance in this process."""
    serve.run(nothing.bind(), local=True, name="unrelated")
    yield
    serve.shutdown()


@serve.deployment(version="1")
class Echo:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs
        self.config: Any = None

    def reconfigure(self, config: Any) -> None:
        self.config = config

    def __call__(self, *args: Any) -> Any:
        return self.config, serve.get_current_replica_tag()

    def arguments(self) -> Any:
        return self.args, self.kwargs


def call(deployment: Any) -> Any:
    return deployment.get_handle().remote().result(10)


@pytest.mark.usefixtures("instance")
class TestFunctions:
    def test_a_deployment_brings_its_options_and_arguments(self) -> None:
        given = Echo.options(num_replicas=2, user_config="its own", init_args=(1,), route_prefix="/echoes")
        client = serve.connect()
        client.deploy("one", given, config={"num_replicas": 1})
        info, route = client.get_deployment_info("one")
        assert (info.version, info.config["num_replicas"], route) == ("1", 1, "/echoes")
        assert call(Echo.options(name="one"))[0] == "its own"
        serve.create_backend("two", Echo.bind("bound", key=2), config={"user_config": "other"})
        assert serve.get_backend_config("two").user_config == "other"
        serve.create_backend("three", given, "given")
        for name, (args, kwargs) in {"two": (("bound",), {"key": 2}), "three": (("given",), {})}.items():
            serve.create_endpoint(name, backend=name)
            handle = serve.get_handle(name).options(method_name="arguments")
            assert handle.remote().result(10) == (args, kwargs)

    def test_an_application_of_several_deployments_is_refused(self) -> None:
        inner = Echo.bind()
        for definition, args, text in (
            (
                Echo.bind(inner),
                (),
                "'b' has <Application 'Echo'> as an argument; run it with serve.run",
            ),
            (Echo, ([inner],), "'b' has <Application 'Echo'> as an argument"),
            (Echo, (Echo,), r"'b' has Deployment\(name=Echo.* as an argument"),
            (Echo.bind(1), (2,), "<Application 'Echo'> already has the arguments of its bind"),
            (
                Echo.options(deployment_actors=[{"name": "a", "actor_class": dict}]),
                (),
                "has deployment_actors",
            ),
        ):
            with pytest.raises(BadRequestError, match=text):
                serve.create_backend("b", definition, *args)
            with pytest.raises(BadRequestError, match=text):
                serve.connect().deploy("b", definition, *args)

    def test_a_deployment_is_not_made_into_another_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(TypeError, match=r"It is a deployment: .*change it with its options\(\)"):
            serve.deployment(Echo)
        monkeypatch.setitem(sys.modules, "wrapped_echo", SimpleNamespace(Echo=Echo))
        with pytest.raises(ReplicaStartError, match="It is a deployment: pass its class"):
            serve.create_backend("b", "wrapped_echo:Echo", config={"max_constructor_retry_count": 1})

    def test_backends_and_endpoints(self) -> None:
        serve.create_backend("b", lambda request: request.data, config={"num_replicas": 2})
        serve.create_backend("c", lambda request: "c")
        serve.update_backend_config("b", {"num_replicas": 1})
        assert serve.get_backend_config("b").num_replicas == 1
        assert set(serve.list_backends()) >= {"b", "c"}
        serve.create_endpoint("e", backend="b")
        serve.set_traffic("e", {"b": 0.0, "c": 1.0})
        serve.shadow_traffic("e", "b", 0.5)
        assert serve.list_endpoints()["e"] == {
            "route": None,
            "methods": ["GET"],
            "traffic": {"b": 0.0, "c": 1.0},
            "shadows": {"b": 0.5},
            "python_methods": [],
        }
        assert serve.get_handle("e").remote(1).result(10) == "c"
        with pytest.raises(ValueError, match="used by endpoint 'e'"):
            serve.delete_backend("c")
        serve.delete_endpoint("e")
        serve.delete_backend("c")
        assert "c" not in serve.list_backends()

    def test_in_a_replica_they_use_its_instance(self) -> None:
        def create(request: Any) -> list[str]:
            serve.create_backend("inner", lambda request: 1)
            return sorted(serve.list_backends())

        serve.create_backend("outer", create)
        serve.create_endpoint("e", backend="outer")
        assert "inner" in serve.get_handle("e").remote().result(10)
        assert "inner" in serve.list_backends()

    def test_their_awaitable_forms(self) -> None:
        async def main() -> Any:
            await serve.create_backend_async("b", lambda request: request.data)
            await serve.create_endpoint_async("e", backend="b")
            handle = await serve.get_handle_async("e")
            return await handle.remote(3), await serve.list_endpoints_async()

        answer, endpoints = asyncio.run(main())
        assert answer == 3
        assert endpoints["e"]["traffic"] == {"b": 1.0}

    def test_an_awaited_handle_starts_calls_in_a_coroutine(self) -> None:
        serve.create_backend("b", lambda request: request.data)
        serve.create_endpoint("e", backend="b")

        async def relay(request: Any) -> Any:
            handle = request.data
            return type(handle) is AsyncHandle, await (await handle.remote(2))

        serve.create_backend("relay", relay)
        serve.create_endpoint("relay", backend="relay")

        async def main() -> Any:
            handle = serve.get_handle("e", sync=False)
            response = await handle.remote(1)
            assert isinstance(response, serve.handle.Response)
            changed = handle.options(shard_key="k")
            assert type(changed) is AsyncHandle
            relayed = await serve.get_handle("relay", sync=False).remote(changed)
            return await response, await relayed

        assert asyncio.run(main()) == (1, (True, 2))


def test_without_an_instance_they_say_so() -> None:
    with pytest.raises(NotRunningError):
        serve.list_backends()
    with pytest.raises(NotRunningError):
        Echo.deploy()


@pytest.mark.usefixtures("instance")
class TestDeploy:
    def test_it_returns_whether_it_updated(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "daskserve.client"):
            assert Echo.deploy() is True
            assert Echo.deploy() is False
        assert caplog.messages == [
            "Deployment Echo is updated to version '1'",
            "Deployment Echo is already at version '1' and is not updated",
        ]
        before = call(Echo)
        assert Echo.options(user_config="new").deploy() is True
        assert call(Echo) == ("new", before[1])
        assert Echo.options(version="2").deploy() is True
        assert call(Echo)[1] != before[1]

    def test_without_waiting_it_returns_the_goal(self) -> None:
        goal = Echo.deploy(_blocking=False)
        assert isinstance(goal, str)
        assert serve.wait_for_goal(goal, 10)
        assert Echo.deploy(_blocking=False) is None

    def test_the_previous_version_must_match(self) -> None:
        with pytest.raises(ValueError, match="no existing deployment"):
            Echo.options(version="2", prev_version="1").deploy()
        Echo.deploy()
        with pytest.raises(ValueError, match="does not match with the existing version '1'"):
            Echo.options(version="3", prev_version="2").deploy()
        changed = Echo.options(version="2", prev_version="1")
        assert changed.prev_version == "1"
        assert changed.deploy() is True
        assert changed.options(version="3").prev_version is None

    def test_its_arguments_come_before_those_of_the_options(self) -> None:
        deployment = Echo.options(version="a", init_args=(1,), init_kwargs={"k": 2})
        deployment.deploy()
        assert deployment.get_handle().arguments.remote().result(10) == ((1,), {"k": 2})
        deployment.options(version="b").deploy(3)
        assert deployment.get_handle().arguments.remote().result(10) == ((3,), {})

    def test_the_awaitable_forms(self) -> None:
        async def main() -> Any:
            assert await Echo.deploy_async() is True
            handle = await Echo.get_handle_async()
            answer = await handle.remote()
            assert await Echo.url_async() is None  # there is no proxy
            assert Echo.url is None
            found = await serve.list_deployments_async()
            await found["Echo"].delete_async()
            return answer[0], await serve.list_deployments_async()

        answer, left = asyncio.run(main())
        assert answer is None
        assert "Echo" not in left


@pytest.mark.usefixtures("instance")
class TestStored:
    def test_a_deployment_comes_back_as_it_was_deployed(self) -> None:
        deployment = Echo.options(user_config=1, num_replicas=2, route_prefix="/other", init_args=(1, 2))
        deployment.deploy()
        for found in (serve.get_deployment("Echo"), serve.list_deployments()["Echo"]):
            assert found == deployment
            assert repr(found) == "Deployment(name=Echo,version=1,route_prefix=/other)"
            assert (found.num_replicas, found.user_config, found.init_args) == (2, 1, (1, 2))
            assert found != deployment.options(num_replicas=3)

    def test_it_is_deployed_again_with_its_code_and_arguments(self) -> None:
        class Local:
            def __init__(self, *args: Any, more: int) -> None:
                self.args = (*args, more)

            def __call__(self) -> Any:
                return self.args

        serve.deployment(Local).deploy("a", more=1)
        found = serve.get_deployment("Local")
        assert found.deploy() is True
        assert call(found) == ("a", 1)
        found.options(version="v").deploy("b", more=2)
        again = load_bytes(dump_bytes(serve.get_deployment("Local")))
        again.delete()
        again.deploy()
        assert call(again) == ("b", 2)
        assert (again.version, again.route_prefix) == ("v", "/Local")

    def test_large_arguments_come_back(self) -> None:
        Echo.deploy(np.ones(SHARED_BYTES, np.uint8))
        found = serve.get_deployment("Echo")
        assert found.init_args[0].sum() == SHARED_BYTES
        asyncio.run(serve.get_deployment("Echo").options(version="2").deploy_async())
        found.options(version="3").deploy()
        assert found.get_handle().arguments.remote().result(10)[0][0].sum() == SHARED_BYTES

    def test_its_environment_comes_back_with_the_files(self, tmp_path: Path) -> None:
        (tmp_path / "module_of_files.py").write_text("")
        # No worker has room, so no process of the environment starts.
        deployment = Echo.options(
            env={"env_vars": {"A": "b"}, "working_dir": str(tmp_path)}, actor_options={"num_cpus": 1000}
        )
        deployment.deploy(_blocking=False)
        found = serve.get_deployment("Echo")
        assert found == deployment
        assert found.files is not None
        before = Path.cwd()
        changed = found.options(user_config=1)
        assert changed.files is found.files
        assert Path.cwd() == before
        changed.deploy(_blocking=False)
        again = serve.get_deployment("Echo")
        assert bytes(again.files.archive) == bytes(found.files.archive)
        assert again.options(env=None).files is None

    def test_code_that_does_not_unpickle_here_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = ModuleType("only_there")
        exec("def f(): return 1", vars(module))
        monkeypatch.setitem(sys.modules, "only_there", module)
        serve.deployment(vars(module)["f"]).deploy()
        monkeypatch.delitem(sys.modules, "only_there")
        found = serve.list_deployments()["f"]
        assert found.num_replicas == 1
        with pytest.raises(BadRequestError, match=r"'f' cannot be unpickled in this process: ModuleNotFound"):
            _ = found.func_or_class
        replaced = found.options(lambda: 2, init_args=(), init_kwargs={})
        replaced.deploy()
        assert call(found) == 2


def test_large_code_that_the_instance_has_dropped() -> None:
    def run(coroutine: Any, *, timeout_s: float | None) -> Any:
        return asyncio.run(coroutine)

    async def fetch_parcel(code_name: str, parcel: Any) -> Any:
        raise InstanceError(f"The store has lost the constructor arguments of {code_name}.")

    connection = SimpleNamespace(
        cluster=lambda instance: SimpleNamespace(fetch_parcel=fetch_parcel), sync=run, runs_here=bool
    )
    code, _ = pack_code(np.ones(SHARED_BYTES, np.uint8))
    stored = StoredCode("d", code, "d@1", SimpleNamespace(cluster_connection=connection, instance="i"))  # type: ignore[arg-type]
    with pytest.raises(NotFoundError, match="'d' is no longer stored"):
        finish(stored.load(asynchronous=False))


def test_large_code_on_the_loop_that_has_to_fetch_it() -> None:
    async def main() -> None:
        async with local_instance_async() as client:
            await client.deploy("Echo", Echo.func_or_class, np.ones(SHARED_BYTES, np.uint8))
            stored = (await client.stored_deployments("Echo"))["Echo"].code
            with pytest.raises(BlockingCallError, match="deploy_async"):
                await stored.load(asynchronous=False)
            assert (await stored.load(asynchronous=True))["init_args"][0].sum() == SHARED_BYTES

    asyncio.run(main())


@each_case(
    ("error", "options"),
    [
        (TypeError, {"version": 1}),
        (TypeError, {"prev_version": 1}),
        (TypeError, {"name": 1}),
        (TypeError, {"init_args": [1]}),
        (TypeError, {"init_kwargs": [1]}),
        (TypeError, {"route_prefix": 1}),
        (ValueError, {"route_prefix": "x"}),
        (ValueError, {"route_prefix": "/x/"}),
        (ValidationError, {"num_replicas": "hi"}),
        (ValidationError, {"num_replicas": 0}),
        (ValidationError, {"max_concurrent_queries": [1]}),
    ],
)
def test_types_are_checked_where_options_are_written(error: type[Exception], options: dict[str, Any]) -> None:
    class Empty:
        pass

    with pytest.raises(error):
        serve.deployment(**options)(Empty)
    with pytest.raises(error):
        serve.deployment(Empty).options(**options)


def test_invalid_deployments_raise_errors() -> None:
    with pytest.raises(TypeError):
        serve.deployment()(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="function, a class"):
        Echo.options(3)
    with pytest.raises(RuntimeError, match="cannot be constructed directly"):
        Echo()
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = Echo.nonsense


def test_the_default_route_follows_the_name() -> None:
    assert Echo.route_prefix == "/Echo"
    assert Echo.options(name="other").route_prefix == "/other"
    assert Echo.options(route_prefix="/x").options(name="other").route_prefix == "/x"
    assert Echo.options(route_prefix=None).route_prefix is None


def test_an_application_has_the_arguments_of_the_options_and_no_route_of_a_deployment() -> None:
    deployment = Echo.options(init_args=(1,), init_kwargs={"k": 2})
    for application, expected in ((deployment.bind(), ((1,), {"k": 2})), (deployment.bind(3), ((3,), {}))):
        assert (application.args, application.kwargs) == expected
    with pytest.raises(BadRequestError, match=r"route_prefix='/x', which is for deploy\(\).* serve.run"):
        Echo.options(route_prefix="/x").bind()
