"""Interpreter settings of a serving process, and their restoration."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import dask
import pytest

from daskserve.cluster.worker import interpreter
from daskserve.cluster.worker.interpreter import SETTLE_S, CollectionPace, InterpreterTuning
from daskserve.testing import wait_until

pytestmark = pytest.mark.virtual_time


class Node:
    """Refers to itself, so that only the garbage collector frees it."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def _nothing_frozen() -> Iterator[None]:
    gc.unfreeze()  # Python 3.12 begins with a few hundred frozen objects
    switch_interval_s, threshold = sys.getswitchinterval(), gc.get_threshold()
    yield
    assert gc.get_threshold() == threshold
    assert gc.get_freeze_count() == 0
    assert sys.getswitchinterval() == switch_interval_s


async def _settled() -> None:
    await asyncio.sleep(SETTLE_S * 1.01)


async def test_objects_are_frozen_after_a_quiet_period_and_unfrozen_at_the_end() -> None:
    tuning = InterpreterTuning()
    tuning.open()
    try:
        assert sys.getswitchinterval() == pytest.approx(0.001)
        for _ in range(3):
            await asyncio.sleep(SETTLE_S * 0.9)
            tuning.objects_changed()
            assert gc.get_freeze_count() == 0
        await _settled()
        assert gc.get_freeze_count() > 1000
    finally:
        tuning.close()
        tuning.close()
    tuning.objects_changed()
    await _settled()


async def test_frozen_garbage_is_freed_at_the_next_change() -> None:
    tuning = InterpreterTuning()
    node = Node()
    seen = weakref.ref(node)
    tuning.open()
    try:
        await _settled()
        del node
        gc.collect()
        assert seen() is not None, "it was not set aside"
        tuning.objects_changed()
        await _settled()
        assert seen() is None
    finally:
        tuning.close()


async def test_freezing_can_be_disabled() -> None:
    with dask.config.set({"daskserve.process": {"gc_freeze": False, "switch_interval_s": None}}):
        tuning = InterpreterTuning()
    switch_interval_s = sys.getswitchinterval()
    tuning.open()
    await _settled()
    assert gc.get_freeze_count() == 0
    assert sys.getswitchinterval() == switch_interval_s
    tuning.close()


def test_collections_become_rarer_until_one_finds_garbage() -> None:
    usual, found = gc.get_threshold(), []
    pace = CollectionPace(4 * usual[0])
    gc.disable()  # threads of other tests may live, which make garbage or start collections
    pace.open()
    try:
        for collected in (0, 0, 0, 1, 0):
            gc.callbacks[-1]("stop", {"generation": 0, "collected": collected, "uncollectable": 0})
            found.append(gc.get_threshold()[0] // usual[0])
        assert found == [2, 4, 4, 1, 2]
        Node()
        gc.collect(0)
        assert gc.get_threshold() == usual
    finally:
        pace.close()
        pace.close()
        gc.enable()
    gc.collect(0)
    assert gc.get_threshold() == usual


@pytest.mark.parametrize("limit", [None, 10])
def test_a_threshold_of_the_user_stays(limit: int | None) -> None:
    usual = gc.get_threshold()
    pace = CollectionPace(10_000)
    pace.open()
    try:
        gc.set_threshold(123, 4, 5)
        for _ in range(3):
            gc.collect(0)
        assert gc.get_threshold() == (123, 4, 5)
        off = CollectionPace(limit)
        off.open()
        gc.collect(0)
        off.close()
    finally:
        pace.close()
        assert gc.get_threshold()[0] == 123
        gc.set_threshold(*usual)


@pytest.mark.parametrize("has_replicas", [True, False])
def test_a_process_with_replicas_imports_the_client_before_user_code_does(
    has_replicas: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"client_of_a_test_{has_replicas}"
    (tmp_path / f"{name}.py").write_text("import threading\nTHREAD = threading.current_thread()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(interpreter, "CLIENT", name)
    monkeypatch.setattr(interpreter, "SETTLE_S", 0)

    async def main() -> None:
        tuning = InterpreterTuning(lambda: has_replicas)
        tuning.open()
        try:
            await wait_until(gc.get_freeze_count)
        finally:
            tuning.close()

    asyncio.run(main())
    found = sys.modules.pop(name, None)
    assert (found is not None) == has_replicas
    assert found is None or found.THREAD is not threading.main_thread()
