"""Where a thread hangs that loads what users wrote."""

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
    yield thread
    thread.join(10)
    assert not thread.is_alive()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[threading.Event]:
    """What modules of the test wait for when they are imported; they find it in `sys`."""
    gate, monkeypatched = threading.Event(), tmp_path / "inner_of_importing.py"
    monkeypatch.setattr(sys, "gate_of_importing", gate, raising=False)
    monkeypatched.write_text("import sys\n\nsys.gate_of_importing.wait(30)\n")
    (tmp_path / "outer_of_importing.py").write_text("import inner_of_importing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield gate
    gate.set()
    for name in ("outer_of_importing", "inner_of_importing"):
        sys.modules.pop(name, None)


def wait_for(thread: threading.Thread, words: str) -> str:
    for _ in range(1000):
        if words in (found := thread_location(thread)):
            return found
        threading.Event().wait(0.005)
    raise AssertionError(found)


def test_an_import_that_hangs_is_named_with_its_place(gate: threading.Event) -> None:
    with running(importlib.import_module, "outer_of_importing") as thread:
        # It waits within `threading`, but that is not what the user has to look at.
        found = wait_for(thread, "importing inner_of_importing for outer_of_importing")
        assert "inner_of_importing.py:3," in found
        assert found.endswith(REMEDY)
        gate.set()


@pytest.mark.parametrize("how", [importlib.import_module, __import__])
@pytest.mark.parametrize("is_known", [True, False])
def test_who_waits_for_an_import_of_somebody_else_is_told_so(
    how: Callable[[str], Any], is_known: bool, gate: threading.Event
) -> None:
    with running(importlib.import_module, "outer_of_importing") as first:
        wait_for(first, "inner_of_importing.py:3")
        module = sys.modules["inner_of_importing"]
        if not is_known:
            del sys.modules["inner_of_importing"]  # which does not help
        with running(how, "inner_of_importing") as second:
            found = wait_for(second, "an earlier import of inner_of_importing has not ended")
            assert found.endswith(REMEDY)
            sys.modules["inner_of_importing"] = module  # where the first one looks for it at its end
            gate.set()


def test_code_that_hangs_outside_of_imports_is_named_by_its_place_alone(gate: threading.Event) -> None:
    def hang() -> None:
        gate.wait(30)

    with running(hang) as thread:
        found = wait_for(thread, "test_importing.py:")
        assert REMEDY not in found
        gate.set()


def test_one_that_has_ended_is_nowhere() -> None:
    thread = threading.Thread(target=int)
    assert thread_location(thread) == ""
    thread.start()
    thread.join()
    assert thread_location(thread) == ""
