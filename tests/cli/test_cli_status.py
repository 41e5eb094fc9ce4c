"""``daskserve status``, and what all commands share: exit codes, JSON and colours."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tables import each_case

import daskserve as serve
from daskserve.cli import instance
from daskserve.cli.main import main
from daskserve.cli.views import status as cli_status
from daskserve.client.functions.discovery import named_instance
from daskserve.client.views.status import ApplicationStatus, BackendStatus, Status
from daskserve.errors import ClusterUnreachableError, NotRunningError

ADDRESS = ("-a", "tcp://host:1")


class Known:
    """A client whose instance has a fixed status."""

    def __init__(self, *statuses: Status, others: tuple[str, ...] = ()) -> None:
        self.found = statuses[0]
        self.instance_name = self.found.instance
        self._later = list(statuses)
        self._others = others

    def status(self) -> Status:
        return self.found

    def controller_health(self, timeout_s: float) -> None:
        pass

    def instances(self) -> list[str]:
        return [self.instance_name, *self._others]

    def next_status(self, seen: str) -> tuple[str, Status | None]:
        if not self._later:
            raise KeyboardInterrupt
        return f"{seen}x", self._later.pop(0)

    def disconnect(self) -> None:
        pass


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Status:
    """The status of an instance with an application that runs and one that has failed."""
    found = Status(
        instance="i",
        applications={"shop": ApplicationStatus("RUNNING"), "bank": ApplicationStatus("DEPLOY_FAILED", "no")},
        backends={
            "shop/a": BackendStatus("HEALTHY", 1, 1, application="shop"),
            "bank/a": BackendStatus("UPDATING", 1, 0, application="bank"),
        },
    )
    monkeypatch.setattr(instance, "connect", lambda **_: Known(found))
    return found


def call(command: str, *arguments: str, **how: Any) -> Result:
    return CliRunner().invoke(main, [command, *ADDRESS, *arguments], **how)


def fail(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def connect(**_: Any) -> None:
        raise error

    monkeypatch.setattr(instance, "connect", connect)


@each_case("error", [NotRunningError("Nothing runs."), ClusterUnreachableError("Nothing runs.")])
def test_without_an_instance_or_a_cluster_commands_exit_with_3(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, error)
    for command in ("status", "rewrite-store"):
        found = call(command)
        assert (found.exit_code, found.stdout, found.stderr) == (3, "", "Error: Nothing runs.\n")


def test_shutdown_without_an_instance_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, NotRunningError("No instance x runs."))
    for arguments in ((), ("--yes",)):
        found = call("shutdown", *arguments)
        assert (found.exit_code, found.output) == (0, "No instance runs.\n")
    named = call("shutdown", "--instance", "x")
    assert (named.exit_code, named.stderr) == (3, "Error: No instance x runs.\n")


def test_errors_of_a_command_that_prints_json_are_json(monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, NotRunningError('Nothing "runs".'))
    found = call("status", "--json")
    assert (found.exit_code, found.stdout) == (3, "")
    assert json.loads(found.stderr) == {"error": {"type": "NotRunningError", "message": 'Nothing "runs".'}}


def test_the_status_of_what_failed_exits_with_1(shop: Status) -> None:
    assert call("status").exit_code == 1
    assert (call("status", "-n", "bank").exit_code, call("status", "-n", "shop").exit_code) == (1, 0)
    plain = json.loads(call("status", "--json", "-n", "shop").stdout)
    assert (list(plain["applications"]), list(plain["backends"])) == (["shop"], ["shop/a"])
    unknown = call("status", "--name", "x")
    assert (unknown.exit_code, unknown.stderr) == (
        1,
        "Error: There is no application 'x'; there are: 'shop', 'bank'.\n",
    )


def test_states_have_colours_on_a_terminal_only(shop: Status, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b" not in call("status").stdout
    coloured = call("status", color=True).stdout
    assert "\x1b[32mHEALTHY\x1b[0m" in coloured
    assert "\x1b[31mDEPLOY_FAILED\x1b[0m" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in call("status", color=True).stdout


def test_the_status_of_an_instance_is_a_json_document(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve.testing.local_instance() as client:
        monkeypatch.setattr(instance, "connect", lambda **_: serve.connect())
        serve.run(serve.deployment("builtins.repr").bind(), name="shop", route_prefix="/shop")
        found = json.loads(call("status", "--json").stdout)
        assert found["applications"]["shop"]["status"] == "RUNNING"
        assert found["instance"] == client.instance_name


def test_a_watch_shows_each_change_until_ctrl_c(shop: Status, monkeypatch: pytest.MonkeyPatch) -> None:
    healed = replace(shop, applications={**shop.applications, "bank": ApplicationStatus("RUNNING")})
    states = [shop, shop, healed, shop]
    monkeypatch.setattr(instance, "connect", lambda **_: Known(*states))
    watched = call("status", "--watch", "--json")
    lines = [json.loads(line) for line in watched.stdout.splitlines()]
    assert [each["applications"]["bank"]["status"] for each in lines] == [
        "DEPLOY_FAILED",
        "RUNNING",
        "DEPLOY_FAILED",
    ]
    assert watched.exit_code == 0
    assert call("status", "--watch", "-n", "shop").stdout.count("APPLICATION") == 1, "it has not changed"


def test_instances_of_programs_are_all_shown(shop: Status, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance, "connect", lambda **_: Known(shop, others=("b", "c")))
    assert "Other instances on this cluster: b, c. Show one with --instance." in call("status").stdout

    def connect(address: str, name: str | None) -> Known:
        running = {key: {"is_default": False} for key in "ab"}
        return Known(replace(shop, instance=named_instance(running, name) or ""))

    monkeypatch.setattr(instance, "connect", connect)
    monkeypatch.setattr(cli_status, "instances", lambda address: ["a", "b"])
    assert [each["instance"] for each in json.loads(call("status", "--json").stdout)] == ["a", "b"]
    assert call("status", "--instance", "b").stdout.startswith("b at")
    result = call("status", "--name", "nowhere")
    assert (result.exit_code, "has an application 'nowhere'" in result.stderr) == (1, True)
