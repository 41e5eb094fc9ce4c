"""A process that ends also ends its children, and waits no longer than they need."""

from __future__ import annotations

import subprocess
import sys
from multiprocessing import util

from daskserve.internals import child_processes

BEGIN = """
import multiprocessing, signal, sys, time
from daskserve.internals import child_processes

child_processes.TERMINATE_S = 60.0
child_processes.ChildProcesses().open()
context = multiprocessing.get_context("fork")
ready = context.Semaphore(0)

def wait_for_end(seconds):
    def end(*_):
        time.sleep(seconds)
        print(f"ended after {seconds} s", flush=True)
        sys.exit()
    signal.signal(signal.SIGTERM, end)
    ready.release()
    time.sleep(60)

def start(*seconds):
    for each in seconds:
        context.Process(target=wait_for_end, args=[each]).start()
        ready.acquire()
"""


def output(program: str) -> list[str]:
    """Run a program, which must end long before `TERMINATE_S` has passed, and return its lines."""
    command = [sys.executable, "-c", BEGIN + program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert ended.stderr == ""
    return ended.stdout.splitlines()


def test_a_process_without_children_does_not_wait() -> None:
    assert output("print('no children')") == ["no children"]


def test_each_child_may_handle_its_signal() -> None:
    assert output("start(0, 0.3)") == ["ended after 0 s", "ended after 0.3 s"]


def test_a_process_whose_children_may_live_longer_again_keeps_nothing() -> None:
    """A worker may serve any number of instances, one after the other."""
    before = len(util._finalizer_registry)  # type: ignore[attr-defined]
    for _ in range(3):
        children = child_processes.ChildProcesses()
        children.open()
        children.close()
    assert len(util._finalizer_registry) == before  # type: ignore[attr-defined]
