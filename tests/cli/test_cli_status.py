"""``daskserve status``, and what all commands share: exit codes, JSON and colours."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tables import each_case

import daskserve as serve
from daskserve.cli import instance
from daskserve.cli.main import main
from daskserve.client.views.status import ApplicationStatus, BackendStatus, Status
from daskserve.errors import ClusterUnreachableError, NotRunningError

ADDRESS = ("-a", "tcp://host:1")


class Known:
    """A client whose instance has a fixed status."""

    def __init__(self, status: Status) -> None:
        self.found = status

    def status(self) -> Status:
        return self.found

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


def test_what_does_not_run_needs_no_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
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
