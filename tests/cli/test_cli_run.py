"""``daskserve run``: its arguments and errors. It starts nothing here; see the integration tests."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dask.config
import pytest
from click.testing import CliRunner, Result
from pydantic import ValidationError
from tables import each_case

import daskserve as serve
from daskserve.cli import instance
from daskserve.cli.main import main
from daskserve.cli.serving import run
from daskserve.cli.verbs import operate
from daskserve.client.hosting.hosting import HostingMode
from daskserve.client.hosting.reloading.files import EXCLUDES, INCLUDES, Patterns
from daskserve.client.hosting.sources import Source
from daskserve.client.verbs.applications import RunTarget
from daskserve.common import settings
from daskserve.errors import (
    BadRequestError,
    ClosedError,
    PortInUseError,
    ReplicaStartError,
)
from daskserve.options.http import HTTPOptions
from daskserve.testing import local_instance


def invalid() -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        HTTPOptions(**{"port": 70_000, "request_timeout_s": "soon"})
    return caught.value


#: What `daskserve.client.hosting.hosting.host` raises for an application of this name.
FAILURES: Mapping[str, Exception] = {
    "failing": ReplicaStartError(
        "It failed: its constructor may need longer: pass a larger timeout_s.",
        user_traceback="timeout_s of the user",
    ),
    "taken": PortInUseError('Choose another port with http_options={"port": ...}; 0 takes a free one.'),
    "known": BadRequestError("route_prefix is wrong, name='x' is taken; give each its own name=."),
    "invalid": invalid(),
}


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The command's request to run something."""
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    found: dict[str, Any] = {}

    def host(source: Source, options: dict[str, Any], **how: Any) -> None:
        n_workers = settings.local_cluster_size().n_workers
        found.update(source=source, options=options, n_workers=n_workers, **how)
        if source.names[0] in FAILURES:
            raise FAILURES[source.names[0]]

    monkeypatch.setattr(run, "host", host)
    return found


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["run", *arguments])


def test_a_target_is_not_imported_by_the_command(hosted: dict[str, Any]) -> None:
    result = call("nowhere:build", "a=1", "b=x=y", "--name", "n", "--route-prefix", "/r")
    assert result.exit_code == 0, result.output
    assert hosted["source"] == Source((RunTarget("nowhere:build", "n", "/r", {"a": "1", "b": "x=y"}),))
    assert (hosted["address"], hosted["stay"], hosted["n_workers"]) == (None, HostingMode(), 2)
    assert hosted["options"] == {"server": "asyncio"}


def test_only_given_http_options_are_set(hosted: dict[str, Any]) -> None:
    arguments = ["--port", "0", "--server", "uvicorn", "--request-timeout-s", "2.5", "--timeout-s", "90"]
    assert call("m:app", *arguments, "--non-blocking", "--address", "tcp://h:1").exit_code == 0
    assert hosted["options"] == {"port": 0, "server": "uvicorn", "request_timeout_s": 2.5}
    assert (hosted["address"], hosted["source"].timeout_s) == ("tcp://h:1", 90.0)
    assert hosted["stay"] == HostingMode(is_blocking=False)


@each_case(
    ("arguments", "logs"),
    [
        ("", {"enable_access_log": True}),
        ("--no-access-log", {"enable_access_log": False}),
        (
            "--log-encoding json --logs-dir /l",
            {"enable_access_log": True, "encoding": "JSON", "logs_dir": "/l", "output": "both"},
        ),
    ],
)
def test_each_request_is_a_line_unless_an_option_says_otherwise(
    hosted: dict[str, Any], arguments: str, logs: dict[str, Any]
) -> None:
    with dask.config.set({"daskserve.logging": None}):
        assert settings.logging_defaults() is None
        assert call("m:app", *arguments.split()).exit_code == 0
        found = settings.logging_defaults() or {}
        assert {**found, "encoding": found.get("encoding", "").upper()} == {"encoding": "", **logs}


def test_a_factory_is_not_imported_by_the_command(hosted: dict[str, Any]) -> None:
    assert call("nowhere:create", "--factory").exit_code == 0
    assert hosted["source"] == Source((RunTarget("nowhere:create"),), is_factory=True)


@each_case(
    ("arguments", "options"),
    [
        ("--max-body-bytes 8MiB --no-list-routes --debug", {"max_body_bytes": 8 << 20}),
        ("--system-workers a --system-workers b", {"system_workers": ["a", "b"]}),
        (
            "--http-host ::1 --http-port 9 --proxy-location EveryNode",
            {"host": "::1", "location": "EveryNode"},
        ),
        ("--proxy-headers", {"trusted_forwarders": ["127.0.0.1"]}),
        ("--no-proxy-headers", {"trusted_forwarders": []}),
        ("--forwarded-allow-ips 10.0.0.0/8,::1", {"trusted_forwarders": ["10.0.0.0/8", "::1"]}),
        ("--forwarded-allow-ips *", {"trusted_forwarders": ["0.0.0.0/0", "::/0"]}),
    ],
)
def test_every_http_option_is_one_of_the_command(
    hosted: dict[str, Any], arguments: str, options: dict[str, Any]
) -> None:
    result = call("m:app", *arguments.split())
    assert result.exit_code == 0, result.output
    found = HTTPOptions(**hosted["options"])
    assert {name: getattr(found, name) for name in options} == options


def test_a_command_has_every_http_option_that_is_no_python_object() -> None:
    names = {each.name for each in run.run.params}
    assert set(HTTPOptions.model_fields) - names == {"middlewares"}


def test_replicas_of_the_ingress_are_processes_with_workers(hosted: dict[str, Any]) -> None:
    assert call("m:app", "--workers", "3").exit_code == 0
    assert (hosted["source"].ingress, hosted["n_workers"]) == ({"num_replicas": 3}, 3)
    assert hosted["options"] == {"server": "asyncio", "location": "EveryWorker"}
    with dask.config.set({"daskserve.http": {"location": "EveryNode", "port": 1}}):
        assert call("m:app", "--workers", "3", "--server", "tornado", "--port", "2").exit_code == 0
    assert hosted["options"] == {"server": "tornado", "location": "EveryNode", "port": 2}
    assert settings.local_cluster_size().n_workers == 2
    assert call("m:app", "--workers", "3", "--address", "tcp://h:1").exit_code == 0
    assert hosted["source"].ingress == {"num_replicas": 3, "isolation": "process"}
    assert (hosted["options"], hosted["n_workers"]) == ({}, 2)


def test_files_to_follow_have_the_names_of_uvicorn(hosted: dict[str, Any], tmp_path: Path) -> None:
    assert call("m:app", "--reload", "--app-dir", str(tmp_path)).exit_code == 0
    assert hosted["stay"].reload == Patterns((str(tmp_path),))
    assert str(tmp_path) in sys.path
    options = ("--reload-include", "*.html", "--reload-exclude", "out", "--reload-strategy", "recreate")
    assert call("m:app", "-r", "--reload-dir", str(tmp_path), *options).exit_code == 0
    assert hosted["stay"].recreates
    assert hosted["stay"].reload == Patterns((str(tmp_path),), (*INCLUDES, "*.html"), (*EXCLUDES, "out"))


def test_a_file_of_applications_is_run_with_its_http_options(hosted: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    text = (
        "http_options: {port: 9000, max_headers: 9}\nproxy_location: EveryNode\ntarget_capacity: 50\n"
        "applications:\n- {import_path: m:app}\n"
        "- {name: b, route_prefix: /b, import_path: m:build, args: {size: 1}}\n"
    )
    file.write_text(text)
    result = call(str(file), "--port", "0", "--reload")
    assert result.exit_code == 0, result.output
    assert (hosted["source"].names, hosted["source"].capacity) == (["default", "b"], 50.0)
    assert hosted["source"].routes == {"default": "/", "b": "/b"}
    assert hosted["options"] == {
        "server": "asyncio",
        "port": 0,
        "max_headers": 9,
        "location": "EveryNode",
    }
    assert str(file) in hosted["stay"].reload.snapshot()
    file.write_text(text.replace("size: 1", "size: 2"))
    assert hosted["reread"]().targets[1].args == {"size": 2}
    file.write_text("applications: {}\n")
    assert f"{file}:1:15: " in call(str(file)).output


def test_replicas_of_a_cluster_get_the_environment(hosted: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("A=1\nB=${HOME}\n")
    options = ("--env-file", str(tmp_path / ".env"), "--runtime-env-json", '{"env_vars": {"A": "2"}}')
    assert call("m:app", "size=${X}", *options, "-a", "tcp://h:1", "--working-dir", ".").exit_code == 0
    (config,) = hosted["source"].targets
    assert config.env == {"working_dir": ".", "env_vars": {"A": "2", "B": "$${HOME}"}}
    assert config.args == {"size": "$${X}"}


def test_a_file_has_variables_of_the_environment(
    hosted: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {"KEPT": "old"})
    file = tmp_path / ".env"
    file.write_text("# comment\n\nA=1 # one\nexport B = 'x # y'\nC=\nKEPT=new\nURL=http://h/#a\n")
    assert call("m:app", "--env-file", str(file)).exit_code == 0
    assert os.environ == {"KEPT": "old", "A": "1", "B": "x # y", "C": "", "URL": "http://h/#a"}
    file.write_text("A=1\nnonsense\n")
    result = call("m:app", "--env-file", str(file))
    assert result.exit_code == 2
    assert f"{file}:2: a line must have the form NAME=VALUE, got 'nonsense'" in result.output


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
        (["m:app", "--restore", "--non-blocking"], "--restore restores the old version when"),
        (["m:app", "--reload", "--non-blocking"], "--reload watches files while the command runs"),
        (["m:app", "--reload-include", "*.html"], "--reload-include says which files --reload watches"),
        (["m:app", "--port", "1", "--http-port", "2"], "--port is given under two names"),
        (["missing.yaml"], "Error: The file 'missing.yaml' cannot be read: "),
        (
            ["serve.yaml", "--name", "x"],
            "--name is for import paths only; set it in the file 'serve.yaml' instead",
        ),
        (["serve.yaml", "a=1"], "The file 'serve.yaml' sets its own args; leave out a=1."),
        (["m:app", "--runtime-env-json", "{"], "--runtime-env-json is not JSON"),
        (["m:app", "--runtime-env-json", "[1]"], "The environment of replicas must be a mapping, got [1]."),
        (["m:app", "--runtime-env-json", '{"env_vars": 1}'], "env_vars of the environment must be a mapping"),
        (["m:app", "--runtime-env", __file__], "is not YAML: "),
        (["m:app", "--factory", "--working-dir", "."], "--factory cannot be combined with an environment"),
        (
            ["m:app", "--name", "invalid"],
            "Error: port: Input should be less than or equal to 65535, got 70000\n--request-timeout-s: Input",
        ),
        (["m:app", "--workers", "0"], "0 is not in the range x>=1"),
    ],
)
def test_mistakes_are_shown_with_the_options_of_the_command(
    hosted: dict[str, Any], arguments: list[str], text: str
) -> None:
    result = call(*arguments)
    assert result.exit_code != 0
    assert text in result.output


@each_case("command", ["status", "shutdown", "rewrite-store"])
def test_other_commands_need_an_address(command: str) -> None:
    result = CliRunner().invoke(main, [command])
    assert result.exit_code == 2
    assert "Give --address" in result.output


def test_a_shutdown_asks_on_a_terminal_and_needs_yes_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def shut_down(*arguments: str, answer: str = "", is_terminal: bool = False) -> Result:
        monkeypatch.setattr(operate, "is_terminal", lambda: is_terminal)
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
        error = json.loads(shut_down("--json").stderr)["error"]
        assert error["message"].startswith(f"This ends {what}.")
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
