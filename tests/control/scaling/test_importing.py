"""The location of a thread that hangs while it imports user code."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from daskserve.control.scaling.importing import REMEDY, thread_location


@contextmanager
def running(function: Callable[..., Any], *args: Any) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(10)
    assert not thread.is_alive()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[threading.Event]:
    """An event that the test's modules wait for during import; they find it in `sys`."""
    gate, monkeypatched = threading.Event(), tmp_path / "inner_of_importing.py"
    monkeypatch.setattr(sys, "gate_of_importing", gate, raising=False)
    monkeypatched.write_text("import sys\n\nsys.gate_of_importing.wait(30)\n")
    (tmp_path / "outer_of_importing.py").write_text("import inner_of_importing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield gate
    gate.set()
    for name in ("outer_of_importing", "inner_of_importing"):
        sys.modules.pop(name, None)


def wait_for(thread: threading.Thread, *words: str) -> str:
    for _ in range(1000):
        found = thread_location(thread)
        if all(each in found for each in words):
            return found
        threading.Event().wait(0.005)
    raise AssertionError(found)


def test_a_hanging_import_is_described_with_its_location(gate: threading.Event) -> None:
    with running(importlib.import_module, "outer_of_importing") as thread:
        # The thread waits within `threading`, but the user needs the line of their own code.
        inner = "inner_of_importing.py:3,"
        found = wait_for(thread, "importing inner_of_importing for outer_of_importing", inner)
        gate.set()
        assert found.endswith(REMEDY)


@pytest.mark.parametrize("how", [importlib.import_module, __import__])
@pytest.mark.parametrize("is_known", [True, False])
def test_a_thread_that_waits_for_another_import_is_described_as_waiting(
    how: Callable[[str], Any], is_known: bool, gate: threading.Event
) -> None:
    with running(importlib.import_module, "outer_of_importing") as first:
        wait_for(first, "inner_of_importing.py:3")
        module = sys.modules["inner_of_importing"]
        if not is_known:
            del sys.modules["inner_of_importing"]  # this does not release the lock
        with running(how, "inner_of_importing") as second:
            found = wait_for(second, "an earlier import of inner_of_importing has not ended")
            assert found.endswith(REMEDY)
            sys.modules["inner_of_importing"] = module  # the first import looks for it when it ends
            gate.set()


def test_code_that_hangs_outside_imports_is_described_by_its_location_only(gate: threading.Event) -> None:
    def hang() -> None:
        gate.wait(30)

    with running(hang) as thread:
        found = wait_for(thread, "test_importing.py:")
        assert REMEDY not in found
        gate.set()


def test_an_ended_thread_has_no_location() -> None:
    thread = threading.Thread(target=int)
    assert thread_location(thread) == ""
    thread.start()
    thread.join()
    assert thread_location(thread) == ""
