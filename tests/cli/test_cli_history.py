"""``daskserve history``, ``rollback``, ``events`` and ``explain`` on an instance in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tables import each_case

import daskserve as serve
from daskserve.cli.main import main
from daskserve.cli.verbs import operate
from daskserve.cli.views import history as history_module
from daskserve.client.client import Client
from daskserve.client.views.explanation import Explanation
from daskserve.client.views.history import History, Revision
from daskserve.testing import local_instance


def app(version: str) -> serve.Application:
    def model(request: Any = None) -> str:
        return version

    return serve.deployment(model).options(name="model", version=version).bind()


@pytest.fixture(scope="module")
def shop() -> Iterator[Client]:
    """An instance with two versions of the application ``shop``."""
    with local_instance() as client:
        for version in ("1", "2"):
            client.run(app(version), name="shop", route_prefix=None)
        yield client


@pytest.fixture(autouse=True)
def connected(shop: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def connect(*_: Any) -> Iterator[Client]:
        yield shop

    monkeypatch.setattr(history_module, "reading", connect)
    monkeypatch.setattr(operate, "connected", connect)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_history_shows_a_line_for_each_revision() -> None:
    lines = call("history", "shop").stdout.splitlines()
    assert lines[0].split() == ["REVISION", "STATE", "AT", "BY", "CHANGES"]
    assert [line.split()[:2] for line in lines[1:3]] == [["1", "SUPERSEDED"], ["2", "RUNNING"]]
    assert lines[2].endswith("model: code 1 -> 2")


def test_rollback_deploys_an_earlier_revision(shop: Client) -> None:
    found = call("rollback", "shop", "--wait", "--json")
    assert json.loads(found.stdout) == {"application": "shop", "rollback_of": 1, "is_complete": True}
    assert shop.get_app_handle("shop").remote().result() == "1"
    history = json.loads(call("history", "shop", "--json").stdout)
    assert history["revisions"][-1]["rollback_of"] == 1
    assert call("rollback", "shop", "2", "--wait").stdout == "Revision 2 of application 'shop' runs again.\n"
    assert shop.get_app_handle("shop").remote().result() == "2"


@each_case(
    "arguments, text",
    [
        (("rollback", "shop", "99"), "Application 'shop' has no revision 99; it has: 1, 2"),
        (("rollback", "bank"), "Application 'bank' does not exist; there are: shop."),
        (("history", "bank"), "Application 'bank' does not exist"),
        (("explain", "bank"), "bank"),
        (("explain", "shop/nothing"), "There is no backend or deployment 'shop/nothing'"),
    ],
)
def test_unknown_names_are_errors(arguments: tuple[str, ...], text: str) -> None:
    found = call(*arguments, "--json")
    assert found.exit_code == 1
    assert text in json.loads(found.stderr)["error"]["message"]


def test_a_wrong_time_is_a_usage_error() -> None:
    found = call("events", "--since", "yesterday")
    assert found.exit_code == 2
    assert "write it as 90s, 15m, 2h or 1d" in found.stderr


def test_events_shows_a_line_for_each() -> None:
    lines = call("events", "shop", "--since", "1h", "--limit", "1000").stdout.splitlines()
    assert "DEPLOYING" in lines[0]
    assert "Revision 1 of application 'shop' is deployed" in lines[0]
    found = json.loads(call("events", "--json", "--limit", "2").stdout)
    assert [each["number"] for each in found] == sorted(each["number"] for each in found)
    assert len(found) == 2


def test_events_of_a_name_that_nothing_has_say_so() -> None:
    found = call("events", "shopp", "--json")
    assert (found.exit_code, json.loads(found.stdout)) == (0, [])
    assert found.stderr == (
        "There are no such events of 'shopp', and no application 'shopp'; there are: shop.\n"
    )


def test_followed_events_are_one_object_for_each_line(shop: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    class Followed:
        def _events(self, name: str | None, **options: Any) -> Any:
            asked.append(options)
            if len(asked) > 2:
                raise KeyboardInterrupt
            return shop._events(name, limit=2)

    @contextmanager
    def connect(*_: Any) -> Iterator[Any]:
        yield Followed()

    monkeypatch.setattr(history_module, "reading", connect)
    monkeypatch.setattr(operate, "connected", connect)
    found = call("events", "--follow", "--json")
    assert len([json.loads(line) for line in found.stdout.splitlines()]) == 4
    assert asked[1]["after"] == shop._events(None, limit=2).next


def test_explain_shows_one_deployment_or_all() -> None:
    assert call("explain", "shop/model").stdout.startswith("shop/model: 1 of 1 wanted replicas run.")
    assert list(json.loads(call("explain", "shop", "--json").stdout)) == ["model"]


# ---- the texts


def test_a_revision_is_a_line_with_what_it_changed_and_why_it_cannot_return() -> None:
    values: dict[str, Any] = {
        "number": 3,
        "state": "RAN",
        "at": 0.0,
        "ran_at": 1.0,
        "ended_at": None,
        "by": "ann",
        "source": "",
        "origin": {},
        "rollback_of": None,
        "changes": [],
        "reason": "it is broken\nwith more",
        "can_return": True,
    }
    for changed, changes, reason in (
        ({}, "", ""),
        ({"state": "FAILED"}, "", "it is broken"),
        ({"can_return": False}, "", "its code is no longer stored"),
        ({"can_return": False, "state": "FAILED"}, "", "its code is no longer stored"),
        ({"can_return": False, "ran_at": None, "state": "FAILED"}, "", "it is broken"),
        ({"rollback_of": 1}, "back to 1", ""),
        ({"origin": {"git": "abc", "of": "x"}, "rollback_of": 1}, "back to 1; abc x", ""),
        ({"origin": {"git": "a" * 90}}, "a" * 90, ""),
        ({"origin": {"git": "a" * 91}}, "a" * 87 + "...", ""),
    ):
        number, state, _, by, shown, why = Revision(**{**values, **changed}).row()
        assert (number, state, by) == ("3", changed.get("state", "RAN"), "ann")
        assert (shown, why) == (changes, reason), changed
    assert str(History("shop", None, ())) == "shop: no revisions"
    assert "REVISION" in str(History.of({"application": "shop", "current": 3, "revisions": [values]}))


def test_an_explanation_says_who_decides_and_what_happened_last() -> None:
    plain = Explanation("b", 1, 2)
    assert str(plain).splitlines() == [
        "b: 1 of 2 wanted replicas run.",
        "  There is no autoscaling; num_replicas sets the number of replicas.",
    ]
    external = replace(plain, is_external=True, waiting="no room")
    assert str(external).splitlines()[1:] == [
        "  An external scaler sets the number of replicas; until then, num_replicas does.",
        "  Waiting: no room",
    ]
    scaled = replace(plain, policy="load", min_replicas=1, max_replicas=9)
    assert str(scaled).splitlines()[1] == "  load has not run yet, of 1 to 9 allowed"
    group = replace(scaled, group="g", policy_wants=3, is_dry_run=True, reason="why", target_capacity=50.0)
    assert str(group).splitlines()[1:] == [
        "  load, of group 'g', wants 3, of 1 to 9 allowed (dry run: decisions are not applied): why",
        "  The instance has a target capacity of 50 %.",
    ]
    up = replace(group, target_capacity_direction="UP")
    assert str(up).splitlines()[2] == "  The instance has a target capacity of 50 %, UP."
    samples = [
        {"ago_s": 2.0, "ongoing": 1, "queued": 0, "rate": 0.25},
        {"ago_s": 1.0, "ongoing": 3, "queued": 2, "rate": 4},
    ]
    values = {
        "name": "b",
        "running": 1,
        "wanted": 2,
        "samples": samples,
        "events": [(0.0, 1, 2, "a"), (1.0, 2, 3, "b")],
    }
    lines = str(Explanation.of(values)).splitlines()
    assert lines[2:5] == [
        "  Load, newest first:",
        "    1 s ago: 3 running, 2 waiting, 4.0 per second",
        "    2 s ago: 1 running, 0 waiting, 0.2 per second",
    ]
    assert [line.partition(" -> ")[2] for line in lines[6:]] == ["3: b", "2: a"]
