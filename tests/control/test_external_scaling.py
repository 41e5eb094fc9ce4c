"""An external scaler sets the number of replicas: accepted, refused, kept and rolled-back requests."""

from __future__ import annotations

from typing import Any

import pytest
from controller_harness import Stage, boom, play, staged
from pydantic import ValidationError
from tables import each_case

from daskserve.client.views.explanation import Explanation
from daskserve.control.records.records import BackendRecord
from daskserve.errors import (
    BadRequestError,
    ExternalScalerDisabledError,
    NotFoundError,
    ReplicaStartError,
    http_status_of,
)
from daskserve.options.backend import BackendConfig
from daskserve.options.fields.bounds import MOST_REPLICAS, checked_number, number_in

OPEN = {"external_scaler_enabled": True}


def recorded(stage: Stage, tag: str = "b") -> BackendRecord:
    record = stage.stored("backend")[f"backend/{tag}"]
    assert isinstance(record, BackendRecord)
    return record


def count(stage: Stage) -> int:
    return len(stage.running_of("b"))


async def scale(stage: Stage, number: Any, name: str = "b") -> None:
    assert await stage.call("scale", name=name, number=number) == number


@staged(workers=4)
async def test_a_number_is_recorded_with_its_reason_and_outlives_the_controller(stage: Stage) -> None:
    await stage.create(num_replicas=2, **OPEN)
    config_id = recorded(stage).config_id
    await scale(stage, 4)
    await stage.until(lambda: count(stage) == 4)
    await stage.until(lambda: {each.rank_info[3] for each in stage.running.values()} == {4})
    await scale(stage, 4)
    await stage.crash_controller()
    await stage.until(lambda: count(stage) == 4)
    await scale(stage, 1)
    await stage.until(lambda: count(stage) == 1)
    explanation = Explanation.of(await stage.call("explain", name="b"))
    assert [(each.before, each.after) for each in explanation.events] == [(2, 4), (4, 1)]
    assert "asked for by the external scaler" in str(explanation)
    assert "An external scaler sets the number of replicas" in str(explanation)
    assert (explanation.wanted, explanation.policy, explanation.is_external) == (1, "", True)
    assert (await stage.call("status"))["backends"]["b"]["status"] == "HEALTHY"
    assert recorded(stage).config_id == config_id


def test_a_scaler_without_permission_is_rejected_and_changes_nothing() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.create(num_replicas=2)
        with pytest.raises(ExternalScalerDisabledError, match="set external_scaler_enabled=True"):
            await scale(stage, 3)
        with pytest.raises(NotFoundError, match="There is no backend or deployment 'c'; there are: b"):
            await scale(stage, 3, "c")
        await stage.create("a", autoscaling_config={"max_replicas": 3})
        with pytest.raises(ExternalScalerDisabledError):
            await scale(stage, 3, "a")
        await stage.update(**OPEN)
        assert stage.reconfigured == []
        assert recorded(stage).scaled_to is None
        await scale(stage, 3)
        await stage.update(external_scaler_enabled=False)
        assert (recorded(stage).num_replicas, count(stage)) == (2, 2)
        with pytest.raises(ExternalScalerDisabledError):
            await scale(stage, 3)

    play(scenario)
    assert http_status_of(ExternalScalerDisabledError()) == 412


@each_case(
    ("application", "name", "tag"),
    [
        ("shop", "model", "shop/model"),
        ("default", "model", "model"),
        ("", "shop/model", "shop/model"),
        ("", "shop", "shop/front"),
        ("default", "classic", "classic"),
        ("classic", "classic", "classic"),
    ],
)
@staged()
async def test_a_deployment_is_found_by_its_application_and_its_name(
    stage: Stage, application: str, name: str, tag: str
) -> None:
    graph: dict[str, tuple[str, ...]] = {"model": (), "front": ("model",)}
    for app in ("default", "shop"):
        await stage.run(app, graph=graph, route=f"/{app}", model=OPEN, front=OPEN)
    await stage.create("classic", **OPEN)
    assert await stage.call("scale", application=application, name=name, number=2) == 2
    await stage.until(lambda: len(stage.running_of(tag)) == 2)
    assert len(stage.running) == 6


@each_case(
    ("application", "name", "error", "text"),
    [
        (
            "shop",
            "front",
            ExternalScalerDisabledError,
            "^Deployment 'front' of application 'shop' does not allow",
        ),
        (
            "shop",
            "other",
            NotFoundError,
            "^Application 'shop' has no deployment 'other'; it has: model, front.$",
        ),
        (
            "other",
            "model",
            NotFoundError,
            "no application 'other' with .* 'model'; the applications are: shop",
        ),
        ("default", "model", NotFoundError, "no application 'default' with a deployment 'model'"),
        ("shop", "classic", NotFoundError, "has no deployment 'classic'"),
        (
            "",
            "model",
            NotFoundError,
            "no backend or deployment 'model'; there are: classic, shop/front, shop/mod",
        ),
    ],
)
@staged()
async def test_a_deployment_that_is_not_in_the_application_is_not_found(
    stage: Stage, application: str, name: str, error: type[Exception], text: str
) -> None:
    await stage.run("shop", graph={"model": (), "front": ("model",)}, model=OPEN)
    await stage.create("classic", **OPEN)
    with pytest.raises(error, match=text):
        await stage.call("scale", application=application, name=name, number=2)


@staged()
async def test_scaling_without_any_application_says_that_there_is_none(stage: Stage) -> None:
    with pytest.raises(NotFoundError, match="no application 'shop'; the applications are: none"):
        await stage.call("scale", application="shop", name="", number=2)


@staged(workers=4)
async def test_a_redeploy_keeps_the_number_unless_it_sets_another_one(stage: Stage) -> None:
    options: dict[str, Any] = {"num_replicas": 2, **OPEN}
    await stage.deploy(version="1", **options)
    await scale(stage, 4)
    await stage.until(lambda: count(stage) == 4)
    await stage.deploy(version="1", **options)
    await stage.deploy(version="2", **options)
    await stage.deploy(version="2", max_queued_requests=7, **options)
    await stage.update(max_queued_requests=8)
    await stage.until(lambda: count(stage) == 4)
    assert {each.message.replica_tag.partition("#")[0] for each in stage.running_of()} == {"b"}
    assert recorded(stage).scaled_to == 4
    await stage.deploy(version="2", num_replicas=3, **OPEN)
    await stage.until(lambda: count(stage) == 3)
    assert recorded(stage).scaled_to is None
    await scale(stage, 1)
    await stage.update(num_replicas=2)
    assert (recorded(stage).scaled_to, count(stage)) == (None, 2)


@staged(workers=4)
async def test_a_failed_deploy_restores_the_number_set_during_it(stage: Stage) -> None:
    await stage.deploy(version="1", num_replicas=1, **OPEN)
    await scale(stage, 2)
    await stage.until(lambda: count(stage) == 2)
    stage.start = boom()
    wanted = stage.spec("b", version="2", num_replicas=1, **OPEN)
    answer = await stage.call("deploy", **wanted, route="/", methods=["GET"], python_methods=[])
    await scale(stage, 3)
    with pytest.raises(ReplicaStartError):
        await stage.calls.wait_for_goal(answer["goal"], 60)
    stage.start = None
    await stage.until(lambda: count(stage) == 3)
    assert (recorded(stage).version, recorded(stage).num_replicas) == ("1", 3)


@staged(workers=2)
async def test_a_deploy_does_not_wait_for_more_replicas_than_it_asks_for(stage: Stage) -> None:
    await stage.create(num_replicas=1, actor_options={"num_cpus": 4}, **OPEN)
    await scale(stage, 3)  # the workers have room for two
    await stage.until(lambda: count(stage) == 2)
    await stage.update(max_queued_requests=7)
    assert (recorded(stage).num_replicas, count(stage)) == (3, 2)
    waiting = (await stage.call("status"))["backends"]["b"]
    assert (waiting["wanted"], waiting["running"], waiting["status"]) == (3, 2, "UPDATING")
    assert waiting["message"]


@staged()
async def test_between_the_autoscaler_and_a_scaler_outside_the_number_stays(stage: Stage) -> None:
    auto = {"min_replicas": 0, "initial_replicas": 3, "max_replicas": 4, "downscale_delay_s": 600}
    await stage.create(autoscaling_config=auto)
    assert count(stage) == 3
    with pytest.raises(
        BadRequestError, match="cannot be combined with autoscaling_config, because only one of them"
    ):
        await stage.update(**OPEN)
    await stage.update(autoscaling_config=None, **OPEN)
    assert (recorded(stage).num_replicas, count(stage)) == (3, 3)
    await scale(stage, 2)
    with pytest.raises(BadRequestError, match="external_scaler_enabled=False to scale by load"):
        await stage.update(autoscaling_config=auto)
    with pytest.raises(BadRequestError, match="external_scaler_enabled=True cannot be combined"):
        await stage.update(num_replicas="auto")
    await stage.update(autoscaling_config=auto, external_scaler_enabled=False)
    assert recorded(stage).num_replicas == 2
    await stage.update(autoscaling_config={**auto, "initial_replicas": 0, "downscale_delay_s": 0})
    await stage.until(lambda: count(stage) == 0)
    await stage.update(autoscaling_config=None, **OPEN)
    assert (recorded(stage).num_replicas, count(stage)) == (1, 1)  # no request could wake it


@each_case("auto", [{"autoscaling_config": {"max_replicas": 3}}, {"num_replicas": "auto"}])
def test_both_at_once_are_refused_when_they_are_given(auto: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="set autoscaling_config=None to scale from outside"):
        BackendConfig(**auto, **OPEN)
    config = BackendConfig(**auto)
    with pytest.raises(ValidationError, match="only one of them can set"):
        config.external_scaler_enabled = True


@each_case(
    ("body", "message"),
    [
        (b"", 'the body is not JSON; send {"target_num_replicas": 3}'),
        (b"\xff", "the body is not JSON"),
        (b'{"target_num_replicas": 3', "the body is not JSON"),
        (b"[" * 4000, "the body is not JSON"),
        (b'{"target_num_replicas": ' + b"9" * 4000 + b"}", "out of range"),
        (b'{"target_num_replicas": ' + b"9" * 5000 + b"}", "the body is not JSON"),
        (b"[3]", "the body has no target_num_replicas"),
        (b"3", "the body has no target_num_replicas"),
        (b'{"num_replicas": 3}', "the body has no target_num_replicas"),
        (b'{"target_num_replicas": null}', "is None; give a whole number"),
        (b'{"target_num_replicas": "' + b"3" * 99 + b'"}', "3...; give a whole number"),
        (b'{"target_num_replicas": 3.5}', "is 3.5; give a whole number"),
        (b'{"target_num_replicas": NaN}', "is nan; give a whole number"),
        (b'{"target_num_replicas": true}', "is True; give a whole number"),
        (b'{"target_num_replicas": {}}', "is {}; give a whole number"),
        (b'{"target_num_replicas": -1}', "is -1; give a number from 1 to 10000"),
        (b'{"target_num_replicas": 0}', "is 0; give a number from 1 to 10000"),
        (b'{"target_num_replicas": 10001}', "is 10001; give a number from 1 to 10000"),
    ],
)
def test_a_body_without_a_number_of_replicas_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        number_in(body)
    assert message in str(caught.value)


def test_a_number_in_a_body_is_read_whatever_else_is_there() -> None:
    assert number_in(b' {"target_num_replicas": 7, "why": "because"}\n') == 7
    assert number_in('{"target_num_replicas": 1}'.encode("utf-16")) == 1
    assert checked_number(MOST_REPLICAS) == MOST_REPLICAS
