"""``daskserve rollout``."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner
from tables import each_case

from daskserve.cli import instance
from daskserve.cli.main import main

GOING_ON: dict[str, Any] = {
    "deployment": "shop/m",
    "state": "SERVING",
    "version": "2",
    "stable": "1",
    "why": "",
    "step": 1,
    "steps": ["5%", "100%"],
    "share": 0.05,
    "replicas": {"candidate": 1, "stable": 4},
    "requests": {"candidate": {"ended": 200, "failed": 3}, "stable": {"ended": 4000, "failed": 4}},
    "gates": [{"metric": "error_rate", "is_worse": False, "text": "3 of 200 requests failed"}],
    "shadowed": {"compared": 9, "different": 1, "samples": ["1 != 2"], "failed": 2, "trouble": "f raised E"},
    "waiting": "",
}
ENDED = {**{name: GOING_ON[name] for name in ("deployment", "version", "stable", "step")}, "why": "it failed"}


class Known:
    """A client that records its calls."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.found = found
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def controller_health(self, timeout_s: float) -> None:
        pass

    def __getattr__(self, verb: str) -> Any:
        def call(**arguments: Any) -> Any:
            self.calls.append((verb, arguments))
            return self.found

        return call


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Known:
    known = Known(GOING_ON)
    monkeypatch.setattr(instance, "connect", lambda **_: known)
    return known


def call(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["rollout", *arguments, "-a", "tcp://host:1"])


def test_the_status_has_the_figures_of_both_versions(client: Known) -> None:
    found = call("status", "shop/m")
    assert found.exit_code == 0
    assert found.output.splitlines() == [
        "shop/m: version '2' beside '1': SERVING",
        "  step 1 of 2 (5% -> 100%), 5 % of the traffic",
        "  candidate: 1 replica, 200 requests at this step, 3 failed",
        "  stable: 4 replicas, 4000 requests at this step, 4 failed",
        "  error_rate: not worse: 3 of 200 requests failed",
        "  shadowed: 1 of 9 answers differ",
        "    2 could not be compared: f raised E",
        "    1 != 2",
    ]
    assert client.calls[0] == ("rollout_status", {"name": "m", "application": "shop"})


@each_case("state, code", [("COMPLETED", 0), ("ROLLED_BACK", 1), ("ABORTED", 1)])
def test_the_exit_code_of_an_ended_rollout(state: str, code: int, client: Known) -> None:
    client.found = {**ENDED, "state": state}
    found = call("status", "m", "--json")
    assert (found.exit_code, json.loads(found.stdout)["state"]) == (code, state)


@each_case(
    "arguments, verb, options",
    [
        (("pause", "m"), "pause_rollout", {}),
        (("promote", "m"), "promote_rollout", {"full": False}),
        (("promote", "m", "--full"), "promote_rollout", {"full": True}),
        (("abort", "m"), "abort_rollout", {}),
    ],
)
def test_a_rollout_is_steered(
    arguments: tuple[str, ...], verb: str, options: dict[str, Any], client: Known
) -> None:
    client.calls.clear()
    assert call(*arguments).exit_code == 0
    assert client.calls[0] == (verb, {"name": "m", "application": "", **options})
