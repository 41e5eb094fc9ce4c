"""The commands for metrics: targets, scrape configuration and rules."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tables import each_case

from daskserve.cli.main import main
from daskserve.cli.metrics.metrics import replace
from daskserve.telemetry.table import SECTIONS

pytestmark = pytest.mark.smoke

TARGETS = [
    {"targets": ["h:2"], "labels": {"dask_role": "worker"}},
    {"targets": ["h:1"], "labels": {"dask_role": "scheduler"}},
]


class Scheduler:
    """A server that answers like the scheduler's HTTP server."""

    def __init__(self) -> None:
        outer = self
        self.answer: tuple[int, Any] = (200, TARGETS)
        self.asked: list[str] = []
        self.missing_bytes = 0

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.path)
                status, body = outer.answer
                self.send_response(status)
                data = json.dumps(body).encode()
                self.send_header("Content-Length", str(len(data) + outer.missing_bytes))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    found = Scheduler()
    thread = threading.Thread(target=lambda: found.server.serve_forever(poll_interval=0.01))
    thread.start()
    yield found
    found.server.shutdown()
    found.server.server_close()
    thread.join()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["metrics", *arguments])


@pytest.mark.parametrize("suffix", ["", "/", "/status", "/daskserve/targets"])
def test_targets_are_printed_in_sorted_order(scheduler: Scheduler, suffix: str) -> None:
    result = run("targets", scheduler.url + suffix)
    assert result.exit_code == 0, result.output
    assert json.loads(result.output) == list(reversed(TARGETS))
    assert scheduler.asked == ["/daskserve/targets"]


def test_targets_are_written_to_a_world_readable_file(scheduler: Scheduler, tmp_path: Path) -> None:
    file = tmp_path / "targets.json"
    assert run("targets", scheduler.url, "--file", str(file)).exit_code == 0
    assert len(json.loads(file.read_text())) == 2
    assert file.stat().st_mode & 0o777 == 0o644
    assert [each.name for each in tmp_path.iterdir()] == ["targets.json"]


@pytest.mark.parametrize(
    "answer",
    [
        (404, []),
        (200, {"a": 1}),
        (200, [{"targets": []}]),
        (200, [{"targets": [], "labels": "none"}]),
        (200, [1]),
    ],
)
def test_a_server_without_targets_is_an_error_with_its_address(scheduler: Scheduler, answer: Any) -> None:
    scheduler.answer = answer
    result = run("targets", scheduler.url)
    assert result.exit_code == (3 if answer[0] == 404 else 1)
    assert f"{scheduler.url} did not return a list of targets" in result.output
    assert ("no instance of daskserve runs there" in result.output) == (answer[0] == 404)


def test_a_scheduler_that_does_not_answer_is_not_running() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        result = run("targets", f"http://127.0.0.1:{taken.getsockname()[1]}")
    assert (result.exit_code, "did not return a list of targets" in result.output) == (3, True)


def test_a_truncated_response_is_an_error(scheduler: Scheduler) -> None:
    scheduler.missing_bytes = 10
    result = run("targets", scheduler.url)
    assert result.exit_code == 1
    assert f"{scheduler.url} did not return a list of targets" in result.output


@each_case(
    ("arguments", "message"),
    [
        (["targets"], "Give the scheduler's address"),
        (["targets", "http://h:1", "--follow"], "--follow is given without --file"),
        (["targets", "http://h:1", "--file", "f", "--follow", "--interval", "0"], "--interval"),
        (["scrape-config", "http://h:1", "--interval", "0"], "--interval"),
        (["scrape-config"], "give an address such as http://scheduler:8787"),
        (["scrape-config", "tcp://h:8786"], "give an address such as http://scheduler:8787"),
    ],
)
def test_wrong_usage_is_an_error_with_a_remedy(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_a_file_that_cannot_be_written_is_an_error(scheduler: Scheduler, tmp_path: Path) -> None:
    result = run("targets", scheduler.url, "--file", str(tmp_path / "none/targets.json"))
    assert (result.exit_code, "Could not write" in result.output) == (1, True)


def test_a_file_that_cannot_be_replaced_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "targets.json").mkdir()
    with pytest.raises(OSError):
        replace(tmp_path / "targets.json", "[]")
    assert [each.name for each in tmp_path.iterdir()] == ["targets.json"]


def test_a_replacement_that_is_interrupted_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "targets.json"
    replace(file, "old")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replace(file, "new")
    assert (file.read_text(), os.listdir(tmp_path)) == ("old", ["targets.json"])


def test_following_rewrites_the_file_only_when_targets_change(scheduler: Scheduler, tmp_path: Path) -> None:
    """Run in a separate process, because the command installs signal handlers."""
    file = tmp_path / "targets.json"
    command = ["-m", "daskserve", "metrics", "targets", scheduler.url, "--file", str(file)]
    follower = subprocess.Popen(
        [sys.executable, *command, "--follow", "--interval", "0.02"], stderr=subprocess.PIPE, text=True
    )
    try:
        assert follower.stderr is not None
        wait_for(scheduler, 3)
        first = file.stat()
        scheduler.answer = (503, [])
        assert "Trying again" in follower.stderr.readline()
        wait_for(scheduler, 3)
        assert (file.stat().st_ino, file.stat().st_mtime_ns) == (first.st_ino, first.st_mtime_ns)
        scheduler.answer = (200, TARGETS[:1])
        wait_for(scheduler, 3)
        assert json.loads(file.read_text()) == TARGETS[:1]
        follower.send_signal(signal.SIGTERM)
        assert follower.wait(10) == 0
        assert follower.stderr.read() == ""
    finally:
        follower.kill()
        follower.wait()
        follower.stderr.close()  # type: ignore[union-attr]


def wait_for(scheduler: Scheduler, count: int) -> None:
    """Return after ``count`` more requests; the last one may be in flight."""
    event = threading.Event()
    until = len(scheduler.asked) + count
    for _ in range(1000):
        if len(scheduler.asked) >= until:
            return
        event.wait(0.01)
    raise AssertionError(f"asked {len(scheduler.asked)} times")


def test_every_metric_is_listed() -> None:
    lines = run("list").output
    assert [
        spec.name for section in SECTIONS.values() for spec in section if spec.exported_name not in lines
    ] == []


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool comes with Debian's prometheus")
def test_promtool_accepts_configuration_and_rules(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(run("rules").output)
    for arguments in (["http://h:8787"], ["--file", str(tmp_path / "targets.json")]):
        file = tmp_path / "prometheus.yml"
        file.write_text(run("scrape-config", *arguments).output + "rule_files: [rules.yml]\n")
        (tmp_path / "targets.json").write_text("[]")
        done = subprocess.run(
            ["promtool", "check", "config", str(file)],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "NO_COLOR": "1"},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "8 rules found" in done.stdout
