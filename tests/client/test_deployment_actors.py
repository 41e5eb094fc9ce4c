"""Deployment actors: objects that the replicas of a deployment share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from tables import each_case

import daskserve as serve
from daskserve.client.definitions.graph import ApplicationGraph
from daskserve.common.types import described, described_actor, short_tag
from daskserve.errors import BadRequestError, NotFoundError, ServeError
from daskserve.options.specs import ApplicationSpec


class Counter:
    def __init__(self, first: int = 0) -> None:
        self.total = first

    def add(self, number: int) -> int:
        self.total += number
        return self.total

    def whose(self) -> Any:
        context = serve.get_deployment_actor_context()
        return context.actor_name, *context.deployment_id


class AsyncCounter:
    async def add(self, number: int) -> int:
        return number


@serve.deployment(
    deployment_actors=[
        serve.config.DeploymentActorConfig(name="counter", actor_class=Counter, init_args=(10,))
    ]
)
class Model:
    def __init__(self) -> None:
        serve.get_deployment_actor("counter").add.remote(1).result()

    def __call__(self, number: int) -> int:
        return serve.get_deployment_actor("counter").add.remote(number).result()

    def missing(self) -> None:
        serve.get_deployment_actor("nobody")

    def subtract(self, stream: bool = False) -> None:
        actor = serve.get_deployment_actor("counter")
        if stream:
            list(actor.add.options(stream=True).remote(1))
        actor.options(method_name="subtract").remote(1).result()

    def context(self) -> None:
        serve.get_deployment_actor_context()


@serve.deployment(deployment_actors=[{"name": "counter", "actor_class": Counter}])
class AsyncModel:
    async def __call__(self) -> Any:
        return await serve.get_deployment_actor("counter").whose.remote()


@pytest.fixture
def _ends() -> Iterator[None]:
    yield
    serve.shutdown()


def spec(deployment: serve.Deployment, name: str = "default") -> ApplicationSpec:
    return ApplicationGraph(deployment.bind(), name).spec(route="/", request_id="r")


def actor(**options: Any) -> serve.Deployment:
    return Model.options(deployment_actors=[{"name": "counter", "actor_class": Counter, **options}])


@pytest.mark.usefixtures("_ends")
def test_replicas_share_an_actor_that_is_up_before_them() -> None:
    handle = serve.run(Model.bind(), local=True, name="shop")
    assert handle.remote(5).result() == 16
    other = serve.run(AsyncModel.bind(), local=True, name="other", route_prefix=None)
    assert tuple(other.remote().result()) == ("counter", "AsyncModel", "other")
    with pytest.raises(ServeError, match="does not run in a deployment actor"):
        handle.context.remote().result()
    with pytest.raises(
        ValueError, match="'Model' of application 'shop' has no actor 'nobody'; it has: 'count"
    ):
        handle.missing.remote().result()


@pytest.mark.parametrize(
    ("app", "whose", "prefix"), [("default", "", ""), ("shop", " of application 'shop'", "shop/")]
)
@pytest.mark.usefixtures("_ends")
def test_errors_and_the_status_call_an_actor_as_its_user_did(
    app: str, whose: str, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Counter):
        def __init__(self) -> None:
            raise RuntimeError("no database")

    handle = serve.run(Model.bind(), local=True, name=app)
    actor_text = f"ctor 'counter' of deployment 'Model'{whose}"
    with pytest.raises(BadRequestError, match=f"^A{actor_text} has no public method 'subtract'"):
        handle.subtract.remote().result()
    with pytest.raises(ServeError, match=f"^Method add of a{actor_text} was called with stream=True"):
        handle.subtract.remote(stream=True).result()
    with pytest.raises(TypeError, match="unsupported operand"):
        handle.remote("many").result()
    assert f" to {prefix}Model:counter#" in caplog.text
    with pytest.raises(
        ServeError, match=f"A{actor_text} failed in its constructor: RuntimeError: no database"
    ):
        serve.run(actor(actor_class=Broken).bind(), local=True, name=app)
    status, name = str(serve.status()), f"{prefix}Model:counter"
    assert f"\n{name} " in status
    assert f" {name}#" in status
    assert "::" not in status
    assert str(serve.explain(name)).startswith(f"{name}: 1 of 1 wanted replicas run.")
    with pytest.raises(NotFoundError, match=f"deployment 'nobody'; there are: {prefix}Model.$"):
        serve.explain("nobody")


@each_case(
    ("tag", "short", "text"),
    [
        ("model", "model", "deployment 'model'"),
        ("model:v1:0a1b2c3d", "model:v1:0a1b2c3d", "deployment 'model:v1:0a1b2c3d'"),
        ("shop/model", "shop/model", "deployment 'model' of application 'shop'"),
        ("model:log::0a1b2c3d", "model:log", "actor 'log' of deployment 'model'"),
        ("shop/m:2:log::0a1b2c3d", "shop/m:2:log", "actor 'log' of deployment 'm:2' of application 'shop'"),
    ],
)
def test_tags_are_described_in_the_words_of_their_user(tag: str, short: str, text: str) -> None:
    assert (short_tag(tag), short_tag(f"{tag}#x"), described(tag)) == (short, f"{short}#x", text)
    assert described(tag, "Deployment") == text[0].upper() + text[1:]
    is_plain = text.startswith("deployment") and "application" not in text
    assert described(tag, "backend") == (text.replace("deployment", "backend") if is_plain else text)
    assert described_actor(f"daskserve/replica/{tag}#x") == f"Replica '{short}#x'"


@pytest.mark.usefixtures("_ends")
def test_the_status_says_whose_actor_it_is_and_the_actor_has_no_route() -> None:
    serve.run(Model.bind(), local=True)
    status = serve.status()
    deployments = status.applications["default"].deployments
    assert {name: each.actor_of for name, each in deployments.items()} == {
        "Model:counter": "Model",
        "Model": "",
    }
    assert "Model:counter (actor), Model" in str(status)
    assert [name for name, each in status.endpoints.items() if each.route] == ["Model"]


@pytest.mark.usefixtures("_ends")
def test_an_actor_keeps_its_state_while_its_code_stays_and_is_new_when_it_changes() -> None:
    handle = serve.run(Model.bind(), local=True)
    assert handle.remote(5).result() == 16
    handle = serve.run(Model.options(max_queued_requests=7).bind(), local=True)
    assert handle.remote(1).result() == 17
    handle = serve.run(actor(init_args=(100,)).bind(), local=True)
    assert handle.remote(0).result() == 101
    tag = spec(actor(init_args=(100,))).deployments[0].spec.tag
    deadline = time.monotonic() + 10
    while [name for name in serve.status().backends if ":" in name] != [tag]:  # the old one ends
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.usefixtures("_ends")
def test_a_failed_update_leaves_the_old_actor_with_its_state() -> None:
    class Broken(Counter):
        def __init__(self) -> None:
            raise RuntimeError("no database")

    handle = serve.run(Model.bind(), local=True)
    assert handle.remote(5).result() == 16
    with pytest.raises(ServeError, match="no database"):
        serve.run(actor(actor_class=Broken).bind(), local=True)
    assert handle.remote(1).result() == 17
    assert serve.status().applications["default"].deployments["Model:counter"].status == "DEPLOY_FAILED"


def test_a_changed_actor_makes_another_version_of_its_deployment() -> None:
    def versions(deployment: serve.Deployment) -> tuple[str, str | None]:
        helper, whole = spec(deployment).deployments
        assert whole.needs == (helper.spec.tag,) == tuple(whole.actors.values())
        return helper.spec.tag, whole.spec.version

    before, again = versions(actor()), versions(actor())
    assert before == again
    assert before[0].startswith("Model:counter:")
    changes: list[dict[str, Any]] = [
        {"init_args": (1,)},
        {"init_kwargs": {"first": 1}},
        {"actor_class": AsyncCounter},
        {"actor_options": {"num_cpus": 1}},
    ]
    for change in changes:
        after = versions(actor(**change))
        assert after[0] != before[0]
        assert after[1] != before[1]
    # A user who names the version decides when the code has changed.
    assert versions(actor(init_args=(1,)).options(version="1")) == versions(actor().options(version="1"))


def test_an_actor_runs_one_call_at_a_time_unless_it_is_async() -> None:
    for options, expected in (
        ({}, 1),
        ({"actor_class": AsyncCounter}, 1000),
        ({"max_concurrency": 4}, 4),
    ):
        helper = spec(actor(**options)).deployments[0].spec
        assert helper.config.max_concurrent_queries == expected
        assert (helper.config.health_check_period_s, helper.config.health_check_timeout_s) == (10, 30)


def test_actors_are_checked_where_they_are_written() -> None:
    config = {"name": "a", "actor_class": Counter}
    with pytest.raises(BadRequestError, match="two actors named 'a'"):
        serve.deployment(deployment_actors=[config, config])
    for wrong, message in (
        ({"name": "a:b"}, "a name without"),
        ({"actor_class": 3}, "a class or its import path"),
        ({"max_concurrency": 0}, "max_concurrency"),
        ({"classs": Counter}, "classs"),
    ):
        with pytest.raises(ValueError, match=message):
            serve.deployment(deployment_actors=[{**config, **wrong}])
    with pytest.raises(TypeError, match="must be a list of DeploymentActorConfig"):
        serve.deployment(deployment_actors=config)  # type: ignore[arg-type]


def test_a_replica_is_needed_to_get_an_actor() -> None:
    with pytest.raises(ServeError):
        serve.get_deployment_actor("counter")
    with pytest.raises(ServeError):
        serve.get_deployment_actor_context()


def test_a_deployment_with_actors_is_not_deployed_alone() -> None:
    with pytest.raises(BadRequestError, match=r"serve.run\(Model.bind"):
        Model.deploy()
