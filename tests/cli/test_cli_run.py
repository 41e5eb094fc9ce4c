"""``daskserve run``: its arguments and errors. It starts nothing here; see the integration tests."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tables import each_case

import daskserve as serve
from daskserve.cli import instance, run, status
from daskserve.cli.main import main
from daskserve.client.hosting.hosting import HostingMode
from daskserve.client.verbs.applications import RunTarget
from daskserve.errors import (
    BadRequestError,
    ClosedError,
    PortInUseError,
    ReplicaStartError,
)
from daskserve.testing import local_instance

#: What `daskserve.client.hosting.hosting.host` raises for an application of this name.
FAILURES: Mapping[str, Exception] = {
    "failing": ReplicaStartError(
        "It failed: its constructor may need longer: pass a larger timeout_s.",
        user_traceback="timeout_s of the user",
    ),
    "taken": PortInUseError('Choose another port with http_options={"port": ...}; 0 takes a free one.'),
    "known": BadRequestError("route_prefix is wrong, name='x' is taken; give each its own name=."),
}


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command wants to run."""
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    found: dict[str, Any] = {}

    def host(target: RunTarget, options: dict[str, Any], **how: Any) -> None:
        found.update(target=target, options=options, **how)
        if target.name in FAILURES:
            raise FAILURES[target.name]

    monkeypatch.setattr(run, "host", host)
    return found


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["run", *arguments])


def test_a_target_is_not_imported_by_the_command(hosted: dict[str, Any]) -> None:
    result = call("nowhere:build", "a=1", "b=x=y", "--name", "n", "--route-prefix", "/r")
    assert result.exit_code == 0, result.output
    assert hosted["target"] == RunTarget("nowhere:build", "n", "/r", {"a": "1", "b": "x=y"})
    assert (hosted["options"], hosted["address"], hosted["stay"]) == ({}, None, HostingMode())


def test_only_given_http_options_are_set(hosted: dict[str, Any]) -> None:
    arguments = ["--port", "0", "--server", "uvicorn", "--request-timeout-s", "2.5", "--timeout-s", "90"]
    assert call("m:app", *arguments, "--non-blocking", "--address", "tcp://h:1").exit_code == 0
    assert hosted["options"] == {"port": 0, "server": "uvicorn", "request_timeout_s": 2.5}
    assert (hosted["address"], hosted["timeout_s"]) == ("tcp://h:1", 90.0)
    assert hosted["stay"] == HostingMode(is_blocking=False)


def test_a_factory_is_not_imported_by_the_command(hosted: dict[str, Any]) -> None:
    assert call("nowhere:create", "--factory").exit_code == 0
    assert hosted["target"].target.deployment.name == "create"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["m:build", "a"], "Write arguments of a builder as KEY=VALUE, got 'a'."),
        (
            ["m:app", "--name", "failing"],
            "Error: It failed: its constructor may need longer: pass a larger --timeout-s.\n\n"
            "timeout_s of the user\n",
        ),
        (["m:app", "--name", "taken"], "Error: Choose another port with --port; 0 takes a free one.\n"),
        (
            ["m:app", "--name", "known"],
            "Error: --route-prefix is wrong, name='x' is taken; give each its own --name.\n",
        ),
        (["m:app", "--restore", "--non-blocking"], "--restore gives the old version back when"),
        (["config.yaml"], "Error: TARGET is the file 'config.yaml', but there are no configuration files."),
    ],
)
def test_mistakes_are_shown_with_the_options_of_the_command(
    hosted: dict[str, Any], arguments: list[str], text: str
) -> None:
    result = call(*arguments)
    assert result.exit_code != 0
    assert text in result.output


@each_case("name", ["config", "deploy", "start"])
def test_a_command_of_ray_serve_says_in_a_line_what_there_is(name: str) -> None:
    result = CliRunner().invoke(main, [name, "config.yaml", "-o", "x", "--help"])
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: There is no command 'daskserve {name}': ")
    assert result.output.count("\n") == 1
    assert name not in CliRunner().invoke(main, ["--help"]).output.split()


@each_case("command", ["status", "shutdown", "rewrite-store"])
def test_other_commands_need_an_address(command: str) -> None:
    result = CliRunner().invoke(main, [command])
    assert result.exit_code == 2
    assert "Give --address" in result.output


def test_a_shutdown_asks_on_a_terminal_and_needs_yes_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def shut_down(*arguments: str, answer: str = "", is_terminal: bool = False) -> Result:
        monkeypatch.setattr(status, "is_terminal", lambda: is_terminal)
        return CliRunner().invoke(main, ["shutdown", "-a", "tcp://host:1", *arguments], input=answer)

    with local_instance() as client:
        monkeypatch.setattr(instance, "connect", lambda **_: serve.connect())
        client.create_backend("b", "builtins.str")
        serve.run(serve.deployment("builtins.repr").bind(), name="shop", route_prefix="/shop")
        what = "instance 'local', which serves 'shop', b"
        refused = shut_down()
        assert (refused.exit_code, refused.output) == (
            1,
            f"Error: This ends {what}. Add --yes, because there is no terminal to ask on.\n",
        )
        declined = shut_down(answer="n\n", is_terminal=True)
        assert declined.exit_code == 1
        assert declined.output.startswith(f"End {what}? [y/N]: n\n")
        assert client.list_backends()
        assert shut_down("-y").exit_code == 0
        with pytest.raises(ClosedError):
            client.list_backends()


def test_the_records_are_rewritten_by_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    with local_instance() as client:
        client.create_backend("b", "builtins.str")
        monkeypatch.setattr(instance, "connect", lambda **_: client)
        count = client.rewrite_store()
        result = CliRunner().invoke(main, ["rewrite-store", "-a", "tcp://host:1"])
        assert (result.exit_code, result.output) == (0, f"{count} records written.\n")


@pytest.mark.parametrize("option", ["--reload", "--workers", "--proxy-headers", "--log-level"])
def test_options_of_uvicorn_say_what_to_do(option: str) -> None:
    ended = call("shop:app", option)
    assert ended.exit_code == 2
    assert f"No such option {option}: " in ended.output
    assert "Did you mean" not in ended.output
