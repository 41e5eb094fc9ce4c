"""``daskserve run``: its arguments and errors. It starts nothing here; see the integration tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from daskserve.cli import run
from daskserve.cli.main import main
from daskserve.client.application_verbs import RunTarget
from daskserve.errors import NotRunningError, ReplicaStartError
from daskserve.testing import local_instance

MODULE = """
import daskserve as serve

@serve.deployment
class Model:
    def __init__(self, *args): ...
    def __call__(self): ...

def build(args):
    return Model.bind(args)

def fail(args):
    raise ValueError("of the user")

def create(): ...
"""


@pytest.fixture
def hosted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What the command wants to run, in a folder with a module ``project``."""
    (tmp_path / "project.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    found: dict[str, Any] = {}

    def host(target: RunTarget, options: dict[str, Any], **how: Any) -> None:
        found.update(target=target, options=options, **how)
        if found["target"].name == "failing":
            raise ReplicaStartError("It failed.", user_traceback="Traceback of the user")

    monkeypatch.setattr(run, "host", host)
    yield found
    sys.modules.pop("project", None)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["run", *arguments])


def test_a_builder_of_the_current_folder_gets_the_arguments(hosted: dict[str, Any]) -> None:
    result = call("project:build", "a=1", "b=x=y", "--name", "n", "--route-prefix", "/r")
    assert result.exit_code == 0, result.output
    target = hosted["target"]
    assert target.target.args == ({"a": "1", "b": "x=y"},)
    assert (target.name, target.route_prefix) == ("n", "/r")
    assert (hosted["options"], hosted["address"], hosted["is_blocking"]) == ({}, None, True)


def test_only_given_http_options_are_set(hosted: dict[str, Any]) -> None:
    arguments = ["--port", "0", "--server", "uvicorn", "--request-timeout-s", "2.5"]
    assert call("project:build", *arguments, "--non-blocking", "--address", "tcp://h:1").exit_code == 0
    assert hosted["options"] == {"port": 0, "server": "uvicorn", "request_timeout_s": 2.5}
    assert (hosted["address"], hosted["is_blocking"]) == ("tcp://h:1", False)


def test_a_factory_is_not_called_here(hosted: dict[str, Any]) -> None:
    assert call("project:create", "--factory").exit_code == 0
    assert hosted["target"].target.deployment.name == "create"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["project:missing"], "Error: Import path 'project:missing': project has no 'missing'."),
        (["nowhere:app"], "there is no module 'nowhere' here. Install it on the workers, too"),
        (["project:Model"], "deployment 'Model', which is not bound"),
        (["project:build", "a"], "Write arguments of a builder as KEY=VALUE, got 'a'."),
        (["project:build", "--name", "failing"], "Error: It failed.\n\nTraceback of the user"),
    ],
)
def test_mistakes_are_shown_without_a_traceback(
    hosted: dict[str, Any], arguments: list[str], text: str
) -> None:
    result = call(*arguments)
    assert result.exit_code != 0
    assert text in result.output


def test_an_error_of_the_users_module_keeps_its_traceback(hosted: dict[str, Any]) -> None:
    result = call("project:fail")
    assert isinstance(result.exception, ValueError)
    assert result.exception.args == ("of the user",)


@pytest.mark.parametrize("command", ["status", "shutdown", "rewrite-store"])
def test_other_commands_need_an_address(command: str) -> None:
    result = CliRunner().invoke(main, [command])
    assert result.exit_code == 2
    assert "Give --address" in result.output


@pytest.mark.parametrize("arguments", [["status"], ["shutdown"], ["shutdown", "--yes"], ["rewrite-store"]])
def test_a_cluster_without_an_instance_is_no_error(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*, address: str) -> None:
        assert address == "tcp://host:1"
        raise NotRunningError("No detached instance runs.")

    monkeypatch.setattr(run, "connect", connect)
    result = CliRunner().invoke(main, [*arguments, "-a", "tcp://host:1"])
    assert (result.exit_code, result.output) == (0, "No instance runs.\n")


def test_the_records_are_rewritten_by_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    with local_instance() as client:
        client.create_backend("b", "builtins.str")
        monkeypatch.setattr(run, "connect", lambda *, address: client)
        count = client.rewrite_store()
        result = CliRunner().invoke(main, ["rewrite-store", "-a", "tcp://host:1"])
        assert (result.exit_code, result.output) == (0, f"{count} records written.\n")
