"""A program that serves: its messages when it ends, and the effect of a second signal."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import daskserve as serve
from daskserve.client.serving.serve_forever import serve_until_ended
from daskserve.errors import ClusterUnreachableError
from daskserve.loops.blocking import finish
from daskserve.testing import local_instance


@pytest.fixture(autouse=True)
def _default_handlers() -> Iterator[None]:
    """Restore the default handlers: a test run may be a shell's background job, which ignores SIGINT."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    signal.signal(signal.SIGINT, previous)


def when(condition: Callable[[], Any], *numbers: signal.Signals) -> threading.Thread:
    """Send signals to this process, each once the condition is true for the signal's number."""

    def send() -> None:
        for number in numbers:
            until = time.monotonic() + 10
            while time.monotonic() < until and not condition():
                time.sleep(0.005)
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


class Waits:
    def __call__(self, request: Any) -> str:
        begun.set()
        may_end.wait(30)
        return "done"


begun, may_end = threading.Event(), threading.Event()


def test_an_end_without_requests_waits_for_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with local_instance() as client:
        handler = signal.getsignal(signal.SIGTERM)
        sending = when(lambda: signal.getsignal(signal.SIGTERM) is not handler, signal.SIGTERM)
        serve.run(serve.deployment("builtins.repr", name="hello").bind(), blocking=True)
        sending.join()
        with pytest.raises(serve.errors.ClosedError):
            client.status()
    assert capsys.readouterr().out.splitlines()[-1].endswith(" Stopping (SIGTERM).")


def test_an_end_says_what_it_waits_for_and_a_second_signal_ends_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines: list[str] = []

    def is_reported() -> bool:
        lines.extend(capsys.readouterr().out.splitlines())
        is_serving = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL and begun.is_set()
        return is_serving if len(sent) == 0 else any("Stopping" in line for line in lines)

    sent: list[int] = []

    with local_instance() as client:
        handle = client.run(serve.deployment(Waits).bind(), name="shop")
        response = handle.remote(None)
        began = time.monotonic()

        def condition() -> bool:
            holds = is_reported()
            if holds:
                sent.append(1)
            return holds

        sending = when(condition, signal.SIGTERM, signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            client.serve_until_interrupted()
        sending.join()
        assert time.monotonic() - began < 10
        with pytest.raises(serve.errors.ServeError):
            response.result(10)
        may_end.set()  # its thread would hold the request for 30 s, in the tests that follow
    (line,) = [each for each in lines if "Stopping" in each]
    assert line.partition(" ")[2] == (
        "Stopping (SIGTERM): waiting up to 20 s for open requests and streams (1 of 'shop'). "
        "Ctrl-C or another SIGTERM ends them at once."
    )


def test_http_options_of_an_instance_that_runs_are_only_compared() -> None:
    app = serve.deployment("builtins.repr", name="hello").bind()
    with local_instance(http_options={"port": 0, "request_timeout_s": 5}) as client:
        port = int(client.http_urls()[0].rpartition(":")[2])
        for same in ({"port": port}, {"port": 0, "request_timeout_s": 5.0}, serve.HTTPOptions(), {}, None):
            serve.run(app, http_options=same)  # a warning would be an error
        with pytest.warns(UserWarning, match="do not change: request_timeout_s is 5.0 instead of 6.0"):
            serve.run(app, http_options={"port": port, "request_timeout_s": 6})
        with pytest.warns(UserWarning, match=f"port is 0 instead of {port + 1}"):
            serve.run(app, http_options=serve.HTTPOptions(port=port + 1))


class LosableConnection:
    """The link of a local instance, whose connection can be lost."""

    is_open, is_closed = True, False

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


def test_a_lost_connection_is_an_error_after_dask_has_given_up(capsys: pytest.CaptureFixture[str]) -> None:
    """Until then, the program waits."""
    left: list[str] = []

    async def leave(signal_name: str) -> None:
        left.append(signal_name)

    with local_instance() as client:
        connection: Any = LosableConnection(client._connection.cluster_connection)

        def lose() -> None:
            connection.is_open = False
            until = time.monotonic() + 10
            while "is lost; waiting" not in capsys.readouterr().out and time.monotonic() < until:
                time.sleep(0.01)
            connection.is_closed = True

        losing = threading.Thread(target=lose)
        losing.start()
        with pytest.raises(ClusterUnreachableError, match="local was lost"):
            finish(serve_until_ended(connection, client.instance_name, leave, asynchronous=False))
        losing.join()
        assert left == [""]
