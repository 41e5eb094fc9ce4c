"""The messages of a slow change, and where they appear."""

from __future__ import annotations

import asyncio
import io
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from daskserve.client.serving.serve_forever import print_line
from daskserve.client.views import progress
from daskserve.client.views.progress import (
    LineDisplay,
    RichDisplay,
    announce,
    find_display,
    wait_visibly,
    waits_for,
)
from daskserve.client.views.status import (
    ActorStatus,
    ApplicationStatus,
    BackendStatus,
    DeploymentStatus,
    GoalStatus,
    Status,
)
from daskserve.testing import local_instance


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Notes:
    """A display that keeps its texts."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def update(self, text: str) -> None:
        self.texts.append(text)

    def close(self) -> None:
        self.texts.append("closed")


def status(states: list[str], message: str = "") -> Status:
    return Status(
        instance="daskserve",
        actors=tuple(ActorStatus("replica", f"echo#{n}", state) for n, state in enumerate(states)),
        backends={"echo": BackendStatus("UPDATING", 3, states.count("RUNNING"), message=message)},
        goals=(GoalStatus("g", "echo", "PENDING"),),
    )


def test_the_text_counts_replicas_and_says_why_they_wait() -> None:
    states = ["RUNNING", "STARTING", "SHOULD_START", "STOPPING", "SHOULD_STOP"]
    assert waits_for(status(states, "no room\nTraceback"), "g") == (
        "echo: 1 of 3 replicas run, 1 starting, 1 waiting for a worker, 2 stopping; no room"
    )
    assert waits_for(status(["RUNNING"]), "g") == "echo: 1 of 3 replicas run"
    assert waits_for(status([]), "another goal") == "Waiting for a change"
    stuck = replace(status(["RUNNING"]), problems={"store": "The disk is full.", "backend/a": "damaged"})
    assert waits_for(stuck, "g") == "echo: 1 of 3 replicas run; The disk is full."


def test_a_deploy_of_an_application_shows_the_deployment_that_the_others_wait_for() -> None:
    deployments = {
        "front": DeploymentStatus("HEALTHY"),
        "back": DeploymentStatus("UPDATING"),
        "last": DeploymentStatus("UPDATING"),
    }
    app = ApplicationStatus("DEPLOYING", deployments=deployments)
    found = Status(
        instance="daskserve",
        actors=(ActorStatus("replica", "x/back#1", "STARTING"),),
        backends={"x/back": BackendStatus("UPDATING", 2, 0)},
        goals=(GoalStatus("g", "", "PENDING", application="x"),),
        applications={"x": app},
    )
    assert waits_for(found, "g") == "x/back: 0 of 2 replicas run, 1 starting"
    busy = ActorStatus("replica", "x/back#1", "STARTING", message="running its constructor")
    assert waits_for(replace(found, actors=(busy,)), "g") == (
        "x/back: 0 of 2 replicas run, 1 starting (running its constructor)"
    )
    actor = replace(
        found,
        backends={"x/back:cache::0123abcd": BackendStatus("UPDATING", 1, 0)},
        applications={"x": replace(app, deployments={"back:cache": DeploymentStatus("UPDATING")})},
    )
    assert waits_for(actor, "g") == "x/back:cache: 0 of 1 replica runs"
    found.applications["x"].deployments.clear()  # type: ignore[attr-defined]
    assert waits_for(found, "g") == "x: DEPLOYING"


def test_a_fast_change_shows_nothing() -> None:
    def make() -> Any:
        raise AssertionError("a display for a fast change")

    async def wait(seconds: float) -> bool:
        return True

    async def describe() -> str:
        return "never"

    asyncio.run(wait_visibly(make, wait, describe))


def test_a_slow_change_shows_what_it_waits_for_until_it_ends_or_fails() -> None:
    waited: list[float] = []

    async def wait(seconds: float) -> bool:
        waited.append(seconds)
        return len(waited) == 4

    display, texts = Notes(), iter("abc")

    async def describe() -> str:
        return next(texts)

    asyncio.run(wait_visibly(lambda: display, wait, describe))
    assert display.texts == ["a", "b", "c", "closed"]
    assert waited == [progress.QUIET_S, *3 * [progress.PERIOD_S]]

    async def fail(seconds: float) -> bool:
        if seconds == progress.PERIOD_S:
            raise ValueError("failed")
        return False

    display, texts = Notes(), iter(["text"])
    with pytest.raises(ValueError, match="failed"):
        asyncio.run(wait_visibly(lambda: display, fail, describe))
    assert display.texts == ["text", "closed"]


def test_without_a_display_the_log_says_now_and_then_what_a_change_waits_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    waited: list[float] = []

    async def wait(seconds: float) -> bool:
        waited.append(seconds)
        return len(waited) == 3

    texts = iter(["echo: 0 of 1 replica runs", "echo: 1 of 1 replica runs"])

    async def describe() -> str:
        return next(texts)

    asyncio.run(wait_visibly(None, wait, describe))
    assert waited == [30.0, 30.0, 30.0]
    assert [(each.levelname, each.message) for each in caplog.records] == [
        ("WARNING", "Still waiting: echo: 0 of 1 replica runs"),
        ("WARNING", "Still waiting: echo: 1 of 1 replica runs"),
    ]


def test_only_the_main_thread_on_a_terminal_or_in_a_notebook_shows_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert find_display() is None
    monkeypatch.setitem(sys.modules, "IPython", _ipython(object()))
    assert find_display() is None  # IPython on a pipe
    kernel = type("Shell", (), {"kernel": None})()
    monkeypatch.setitem(sys.modules, "IPython", _ipython(kernel))
    assert find_display() is not None
    monkeypatch.delitem(sys.modules, "IPython")
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert find_display() is not None
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(find_display()))
    thread.start()
    thread.join()
    assert found == [None]


def _ipython(shell: object) -> Any:
    return type("IPython", (), {"get_ipython": staticmethod(lambda: shell)})


def test_announcements_are_printed_on_terminals_and_logged_elsewhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    streams = {"stdout": io.StringIO(), "stderr": io.StringIO()}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    with caplog.at_level("INFO", "daskserve"):
        announce("in a log")
    assert [each.getMessage() for each in caplog.records] == ["in a log"]
    monkeypatch.setitem(sys.modules, "IPython", _ipython(type("Shell", (), {"kernel": None})()))
    announce("in a notebook")
    assert (streams["stdout"].getvalue(), streams["stderr"].getvalue()) == ("in a notebook\n", "")
    monkeypatch.delitem(sys.modules, "IPython")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    announce("on a terminal")
    assert terminal.getvalue() == "on a terminal\n"
    terminal.close()
    announce("on a terminal that is gone")
    assert len(caplog.records) == 1


def test_without_rich_each_new_text_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(sys, "stderr", terminal)
    make = find_display()
    assert make is not None
    display = make()
    assert isinstance(display, LineDisplay)
    for text in ("one", "one", "two"):
        display.update(text)
    display.close()
    assert terminal.getvalue() == "one\ntwo\n"


def test_rich_draws_the_text_as_it_is() -> None:
    pytest.importorskip("rich")
    terminal = Terminal()
    display = RichDisplay(terminal)
    display.update("a replica needs [bold] CPU")
    display.close()
    assert "a replica needs [bold] CPU" in terminal.getvalue()


def test_a_deploy_shows_what_it_waits_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    go = tmp_path / "go"

    class Touching(Notes):
        def update(self, text: str) -> None:
            super().update(text)
            go.touch()

    class Slow:
        def __init__(self) -> None:
            while not go.exists():
                time.sleep(0.005)

        def __call__(self, value: Any) -> Any:
            return value

    display = Touching()
    monkeypatch.setattr("daskserve.client.instance.connection.find_display", lambda: lambda: display)
    monkeypatch.setattr(wait_visibly, "__kwdefaults__", {"quiet_s": 0.05, "period_s": 0.05, "log_s": 30.0})
    with local_instance() as client:
        client.deploy("slow", Slow)
        assert client.get_handle("slow").remote(1).result() == 1
    assert display.texts[0] == "slow: 0 of 1 replica runs, 1 starting"
    assert display.texts[-1] == "closed"


def test_a_program_may_have_no_output_or_one_that_only_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Logged:
        """An object that some programs put in place of their standard output."""

        def write(self, text: str) -> None: ...

    clock: Any = SimpleNamespace(clock=SimpleNamespace(wall=lambda: 0.0))
    closed = io.StringIO()
    closed.close()
    for stream in (None, Logged(), closed):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(sys, "stdout", stream)
        assert find_display() is None
        print_line(clock, "Serving")
