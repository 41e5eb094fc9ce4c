"""The description of a revision's changes: texts for people, without secrets."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from control_harness import backend
from tables import each_case

from daskserve.control.decisions import differences as options
from daskserve.control.decisions.history.differences import differences
from daskserve.control.records.records import BackendRecord
from daskserve.options.environment import Environment
from daskserve.payload.pickling import dump_bytes

SCALED = {"autoscaling_config": {"max_replicas": 3, "policy_kwargs": {"token": "s3cret"}}}


def test_each_option_is_named_with_its_values_and_nested_ones_alone() -> None:
    before = backend(config=SCALED)
    wider = {"autoscaling_config": {"max_replicas": 9, "policy_kwargs": {"token": "0ther"}}}
    after = replace(
        backend(version="v2", config={**wider, "max_ongoing_requests": 7}), user_config=b"pickled"
    )
    found = {each.what: (each.old, each.new) for each in differences("model", before, after)}
    assert found["code"] == ("v1", "v2")
    assert found["autoscaling_config.max_replicas"] == ("3", "9")
    assert found["max_ongoing_requests"][1] == "7"
    assert found["user_config"][0] == ""
    assert found["user_config"][1].startswith("#")


def configured(value: Any) -> BackendRecord:
    return replace(backend(), user_config=None if value is None else dump_bytes(value))


class Threshold:
    """A value that is not plain."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("code of the user's ran",)


@each_case(
    "one, other, expected",
    [
        (
            {"model": {"threshold": 0.5, "name": "a"}, "labels": ["x", "y"]},
            {"model": {"threshold": 0.75, "name": "a"}, "labels": ["x", "z", "w"]},
            {"model.threshold": ("0.5", "0.75"), "labels[1]": ("y", "z"), "labels[2]": ("", "w")},
        ),
        (None, {"a": 1}, {"a": ("", "1")}),
        ({"a": 1}, None, {"a": ("1", "")}),
        (
            {"db": {"password": "s3cret"}, "url": "http://me:s3cret@host/", "max_tokens": 5},
            {"db": {"password": "s3cret2"}, "url": "http://me:s3cret2@host/", "max_tokens": 7},
            {"db.password": ("***", "***"), "url": ("http://***@host/",) * 2, "max_tokens": ("5", "7")},
        ),
        ({"tokens": ["s3cret"]}, {"tokens": ["s3cret2"]}, {"tokens[0]": ("***", "***")}),
        ("a", "b", {"": ("a", "b")}),
        ({"a": "x"}, {"a": "y" * 500}, {"a": ("x", "y" * 117 + "...")}),
        ({"a": {"b": 1}}, {"a": {}}, {"a.b": ("1", ""), "a": ("", "{}")}),
    ],
)
def test_differences_in_a_user_config_are_named(one: Any, other: Any, expected: dict[str, Any]) -> None:
    found = list(differences("model", configured(one), configured(other)))
    values = {each.what.removeprefix("user_config").removeprefix("."): (each.old, each.new) for each in found}
    assert values == expected


def test_a_user_config_runs_no_code_and_its_differences_are_bounded() -> None:
    loop: list[Any] = []
    loop.append(loop)
    hostile = (Threshold(), {"a": Threshold()}, loop, list(range(20_000)), "x" * (2 << 20), {(1, 2): 3})
    for value in hostile:
        (one,) = differences("model", configured({"a": 1}), configured(value))
        assert (one.what, one.new[:1]) == ("user_config", "#")
    damaged = replace(backend(), user_config=dump_bytes({"a": 1})[:-3])
    (one,) = differences("model", configured({"a": 1}), damaged)
    assert one.what == "user_config"
    many = list(differences("model", configured({}), configured({f"k{n}": n for n in range(100)})))
    assert len(many) == 21
    assert str(many[-1]) == "model: user_config.(80 more)"


def test_defaults_that_were_not_given_are_not_shown() -> None:
    plan = {"steps": ["10%", "100%"], "gates": [{"metric": "latency"}]}
    (one,) = options.differences(backend(), rolled := backend(config={"rollout": plan}))
    assert one.values == (None, plan)
    (one,) = options.differences(rolled, backend(config={"rollout": {**plan, "pause_s": 5}}))
    assert one.values == ({"pause_s": 60}, {"pause_s": 5})


def test_no_secret_is_shown() -> None:
    before = backend(config=SCALED)
    other = {"autoscaling_config": {"max_replicas": 3, "policy_kwargs": {"token": "0ther"}}}
    env = Environment(env_vars={"KEY": "s3cret"}).to_text()
    text = repr(list(differences("model", before, replace(backend(config=other), env=env))))
    assert "KEY" in text
    assert "s3cret" not in text
    assert "0ther" not in text


def test_created_and_removed_deployments_are_named_with_their_versions() -> None:
    (created,) = differences("model", None, backend())
    (removed,) = differences("model", backend(), None)
    assert (str(created), created.new) == ("model: created", "v1")
    assert (str(removed), removed.old) == ("model: removed", "v1")


@each_case(
    "option, one, other",
    [
        ("autoscaling_config", {"max_replicas": 3, "policy": b"\x80one"}, {"policy": b"\x80other"}),
        (
            "request_router_config",
            {"request_router_class": "pickled:b25l"},
            {"request_router_class": "pickled:b3RoZXI="},
        ),
    ],
)
def test_pickled_code_of_an_option_is_shown_as_a_digest(
    option: str, one: dict[str, Any], other: dict[str, Any]
) -> None:
    before, after = (backend(config={option: each}) for each in (one, {**one, **other}))
    (found,) = differences("model", before, after)
    assert found.what.startswith(f"{option}.")
    assert re.fullmatch(r"pickled code #[0-9a-f]{8}", found.old)
    assert re.fullmatch(r"pickled code #[0-9a-f]{8}", found.new)
    assert found.old != found.new
