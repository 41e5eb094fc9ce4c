"""A real instance in this process on a faster clock, so that tests with delays of seconds are short.

User code runs in threads, in real time. Virtual time would run ahead of the threads; a clock that is only
faster does not.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import daskserve as serve
from daskserve.client.functions.local import loop_in_thread
from daskserve.testing import _instance_on

#: Speed of the clock: fast enough for short tests, slow enough that health checks pass on a busy machine.
SPEED = 10
#: Timeout of `poll_for`, in real time.
TIMEOUT_S = 20.0


class _QuickSelector(selectors.DefaultSelector):
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(timeout if timeout is None else timeout / SPEED)


class QuickLoop(asyncio.SelectorEventLoop):
    """An event loop on which `SPEED` seconds take one."""

    def __init__(self) -> None:
        super().__init__(_QuickSelector())

    def time(self) -> float:
        return super().time() * SPEED


@contextmanager
def quick_instance(
    *, workers: int = 2, http_options: Mapping[str, Any] | None = None
) -> Iterator[serve.Client]:
    """Yield the client of an instance on a `QuickLoop`."""
    with loop_in_thread(QuickLoop) as loop, _instance_on(loop, workers, http_options, 60.0, {}) as client:
        yield client


def poll_for(condition: Callable[[], Any], *, what: Callable[[], str]) -> Any:
    """Return the condition's first true value; fail with the text of ``what`` after `TIMEOUT_S`."""
    deadline = time.monotonic() + TIMEOUT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, what()
        time.sleep(0.005)
    return found


def running(client: serve.Client, backend: str = "b") -> int:
    return sum(replica.state == "RUNNING" for replica in client.status().replicas(backend))


def explained(client: serve.Client, backend: str = "b") -> str:
    return str(client.explain(backend))
