"""The functions that run when a process forks, and those that stay registered."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

import pytest

from daskserve.loops.at_fork import ActsAtFork, _watching, watch_forks
from daskserve.loops.forks import ForkGuard
from daskserve.loops.termination import on_sigterm


class Records(ActsAtFork):
    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def before_fork(self) -> None:
        os.write(self.pipe, b"b")

    def after_fork(self) -> None:
        os.write(self.pipe, b"p")

    def after_fork_in_child(self) -> None:
        os.write(self.pipe, b"c")


def fork() -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)


def test_an_object_acts_in_both_processes_for_as_long_as_it_exists() -> None:
    reads, writes = os.pipe()
    records = Records(writes)
    watch_forks(records)
    fork()
    assert sorted(os.read(reads, 9)) == sorted(b"bpc")
    del records
    gc.collect()
    fork()
    os.close(writes)
    assert os.read(reads, 9) == b""
    os.close(reads)


def test_a_process_registers_once_however_many_instances_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    _watching()
    registered: list[Any] = []
    monkeypatch.setattr(os, "register_at_fork", lambda **functions: registered.append(functions))
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        for _ in range(3):
            on_sigterm(lambda done: None)()
            guard = ForkGuard()
            guard.open()
            guard.close()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert registered == []
