"""``daskserve start``, ``controller-health`` and ``completion``: what they print, and how they exit."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import dask
import pytest
from click.testing import CliRunner
from tables import each_case

import daskserve as serve
from daskserve.cli import completion, instance
from daskserve.cli.main import main
from daskserve.cli.serving import start
from daskserve.cli.serving.process import (
    LOG_LEVELS,
    read_variables,
    use_env_file,
    use_log_level,
    use_log_options,
)
from daskserve.client.hosting.detached import DetachedInstance
from daskserve.testing import local_instance


@contextmanager
def local(monkeypatch: pytest.MonkeyPatch) -> Iterator[serve.Client]:
    with local_instance() as client:
        monkeypatch.setattr(instance, "connect", lambda **_: serve.connect())
        yield client


def test_an_instance_is_started_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    found = [""]

    def start_detached(options: dict[str, Any], **how: Any) -> DetachedInstance:
        given.update(options=options, **how)
        return DetachedInstance(serve.connect(), not found[0], found[0])

    monkeypatch.setattr(start, "start_detached", start_detached)
    with local(monkeypatch):
        call = [
            "start",
            "-a",
            "tcp://h:1",
            "--store",
            "sqlite:///s",
            "--http-port",
            "0",
            "--max-headers",
            "9",
            "--name",
            "blue",
        ]
        result = CliRunner().invoke(main, call)
        assert (result.exit_code, result.output) == (0, "Instance 'local' runs.\n")
        assert given == {
            "options": {"port": 0, "max_headers": 9},
            "address": "tcp://h:1",
            "store": "sqlite:///s",
            "name": "blue",
            "tracing_config": None,
        }
        found[0] = "max_headers is 100 instead of 9"
        result = CliRunner().invoke(main, [*call, "--json"])
        assert result.exit_code == 0
        assert json.loads(result.stdout)["is_new"] is False
        assert result.stderr == (
            "Warning: An instance is already running; its HTTP options do not change: --max-headers is 100 "
            "instead of 9.\n"
        )


def test_the_controller_says_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    with local(monkeypatch) as client:
        result = CliRunner().invoke(main, ["controller-health", "-a", "tcp://h:1", "--json"])
        found = json.loads(result.stdout)
        assert (result.exit_code, found["is_alive"], found["epoch"]) == (0, True, client.status().epoch)
        assert 0 <= found["event_loop_delay_s"] < 5
        durations = [found[f"{each}_control_loop_duration_s"] for each in ("last", "mean", "p99")]
        assert all(each >= 0 for each in durations) is (found["num_control_loops"] > 0)
        assert (found["num_control_loop_failures"], found["num_replicas"]) == (0, 0)
        assert min(found["num_asyncio_tasks"], found["process_memory_mb"]) > 0
        text = CliRunner().invoke(main, ["controller-health", "-a", "tcp://h:1"]).output
        assert text.startswith("The controller runs on ")


def test_a_controller_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(*_: Any, **__: Any) -> None:
        await asyncio.sleep(60)

    with local(monkeypatch) as client:
        monkeypatch.setattr(type(client._connection.calls), "call", hang)
        arguments = ["controller-health", "-a", "tcp://h:1", "--timeout-s", "0.05"]
        result = CliRunner().invoke(main, arguments)
        assert (result.exit_code, result.stdout) == (1, "")
        assert "did not answer within 0.05 s" in result.stderr
        result = CliRunner().invoke(main, [*arguments, "--json"])
        assert (result.exit_code, json.loads(result.stdout)["is_alive"]) == (1, False)
        monkeypatch.setattr(instance, "ANSWER_S", 0.05)
        monkeypatch.setattr(instance, "unanswered", lambda *where: f"{where} is silent")
        result = CliRunner().invoke(main, ["status", "-a", "tcp://h:1", "--json"])
        assert (result.exit_code, result.stdout) == (3, "")
        error = {"type": "UnavailableError", "message": "('tcp://h:1', 'local', 0.05) is silent"}
        assert json.loads(result.stderr) == {"error": error}
        monkeypatch.undo()


@each_case("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_a_script(shell: str) -> None:
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0, result.output
    assert "_DASKSERVE_COMPLETE" in result.stdout


def completed(*words: str) -> list[str]:
    found = CliRunner(env={"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}).invoke(
        main, prog_name="daskserve", env={"_DASKSERVE_COMPLETE": "bash_complete"}
    )
    return [line.partition(",")[2] for line in found.output.splitlines()]


def test_commands_and_their_options_are_completed() -> None:
    assert completed("daskserve", "sta") == ["stacks", "start", "status"]
    assert completed("daskserve", "run", "--reload-s") == ["--reload-strategy"]
    assert completed("daskserve", "run", "--reload-strategy", "rec") == ["recreate"]
    assert [completed("daskserve", each, "shop.y") for each in ("run", "deploy", "diff")] == 3 * [["shop.y"]]


def test_completing_a_command_imports_no_other() -> None:
    code = (
        "import os, sys; from daskserve.cli.main import main\n"
        "try: main(prog_name='daskserve')\n"
        "finally: print(sorted(each for each in sys.modules if each.startswith('daskserve.cli')))"
    )
    variables = {"_DASKSERVE_COMPLETE": "bash_complete", "COMP_WORDS": "daskserve s", "COMP_CWORD": "1"}
    found = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False
    )
    assert found.stdout.splitlines()[-1] == "['daskserve.cli', 'daskserve.cli.main']", found.stderr


@each_case("address", ["", "tcp://127.0.0.1:1", "http://127.0.0.1:1"])
def test_names_that_are_not_known_soon_are_not_completed(address: str) -> None:
    context = click.Context(main)
    context.params["address"] = address
    assert completion.complete_applications(context, click.Argument(["app"]), "s") == []


def test_names_of_applications_are_completed_from_the_http_server(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def urlopen(url: str, timeout: float) -> io.BytesIO:
        asked.append(url)
        return io.BytesIO(b'{"applications": {"shop": {}, "prices": {}}}')

    monkeypatch.setattr(completion.urllib.request, "urlopen", urlopen)
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", "http://h:8787/status")
    assert completed("daskserve", "history", "sh") == ["shop"]
    assert completed("daskserve", "status", "-n", "") == ["shop", "prices"]
    assert set(asked) == {"http://h:8787/api/serve/applications/"}

    def no_http(url: str, timeout: float) -> io.BytesIO:
        raise http.client.BadStatusLine("a Dask scheduler")

    monkeypatch.setattr(completion.urllib.request, "urlopen", no_http)
    assert completed("daskserve", "history", "sh") == [""]


# ---- options about the process


@pytest.fixture
def own_logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """The logger of the package, as it is before a command sets it up."""
    logger = logging.getLogger("daskserve")
    before = logger.level, list(logger.handlers)
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    monkeypatch.setenv("DASK_LOGGING__DASKSERVE", "")
    yield logger
    logger.handlers[:] = before[1]
    logger.setLevel(before[0])


def test_the_level_of_messages_is_that_of_the_option_in_this_process_and_those_it_starts(
    own_logger: logging.Logger,
) -> None:
    use_log_level(None)
    assert (own_logger.level, own_logger.handlers) == (logging.NOTSET, [])
    for name, level in LOG_LEVELS.items():
        use_log_level(name.upper())
        assert own_logger.level == level
        assert os.environ["DASK_LOGGING__DASKSERVE"] == logging.getLevelName(level).lower()
    (handler,) = own_logger.handlers
    text = handler.format(logging.LogRecord("daskserve.x", logging.INFO, "", 1, "a %s", ("b",), None))
    assert text.endswith(" - daskserve.x - INFO - a b")


@each_case(
    ("line", "expected"),
    [
        ("A=b", {"A": "b"}),
        ("  export A = b c  # d", {"A": "b c"}),
        ("A='b # c' # d", {"A": "b # c"}),
        ('A="b"', {"A": "b"}),
        ("A=", {"A": ""}),
        ("A=b#c", {"A": "b#c"}),
        ("# A=b", {}),
        ("   ", {}),
        ("_a.b1=c=d", {"_a.b1": "c=d"}),
        ("A=b\n\nB=c\nA=d", {"A": "d", "B": "c"}),
    ],
)
def test_a_line_of_a_file_sets_a_variable(line: str, expected: dict[str, str]) -> None:
    assert read_variables(line, "f") == expected


def test_variables_that_are_set_already_win_over_those_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for line in ("A", "1=b", "=b", "A B=c"):
        with pytest.raises(click.UsageError, match="f:2: a line must have the form NAME=VALUE, got"):
            read_variables(f"X=y\n{line}", "f")
    monkeypatch.setenv("DASKSERVE_TEST_SET", "before")
    monkeypatch.setenv("DASKSERVE_TEST_NEW", "to be removed")
    monkeypatch.delenv("DASKSERVE_TEST_NEW")
    file = tmp_path / "variables"
    file.write_text("DASKSERVE_TEST_SET=file\nDASKSERVE_TEST_NEW=file\n")
    assert use_env_file(None) == {}
    assert use_env_file(str(file)) == {"DASKSERVE_TEST_SET": "before", "DASKSERVE_TEST_NEW": "file"}
    assert (os.environ["DASKSERVE_TEST_SET"], os.environ["DASKSERVE_TEST_NEW"]) == ("before", "file")
    file.write_bytes(b"A=\xff")
    with pytest.raises(click.UsageError, match="is not UTF-8"):
        use_env_file(str(file))


NOTHING = {"access_log": None, "log_encoding": None, "logs_dir": None}


@each_case(
    ("options", "in_file", "is_on", "expected"),
    [
        ({}, None, False, {"encoding": "TEXT"}),
        ({"access_log": False}, None, True, {"encoding": "TEXT", "enable_access_log": False}),
        ({}, None, True, {"encoding": "TEXT", "enable_access_log": True}),
        ({}, {"enable_access_log": False}, True, {"encoding": "TEXT", "enable_access_log": False}),
        ({"log_encoding": "json"}, {"encoding": "x"}, False, {"encoding": "json"}),
        ({}, {"encoding": "x", "logs_dir": "/f"}, False, {"encoding": "x", "logs_dir": "/f"}),
        (
            {"logs_dir": "/o"},
            {"logs_dir": "/f"},
            True,
            {"encoding": "TEXT", "logs_dir": "/o", "enable_access_log": True, "output": "both"},
        ),
        (
            {"logs_dir": "/o"},
            {"output": "files"},
            True,
            {"encoding": "TEXT", "logs_dir": "/o", "enable_access_log": True, "output": "files"},
        ),
    ],
)
def test_options_of_logs_win_over_the_file_which_wins_over_the_configuration(
    options: dict[str, Any], in_file: dict[str, Any] | None, is_on: bool, expected: dict[str, Any]
) -> None:
    with dask.config.set({"daskserve.logging": {"encoding": "TEXT"}}):
        use_log_options({**NOTHING, **options}, in_file, is_access_log_on=is_on)
        assert dask.config.get("daskserve.logging") == expected
