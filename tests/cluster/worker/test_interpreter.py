"""Interpreter settings of a serving process, and their restoration."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from collections.abc import Iterator

import dask
import pytest

from daskserve.cluster.worker.interpreter import SETTLE_S, InterpreterTuning
from daskserve.testing import run_virtual


class Node:
    """Refers to itself, so that only the garbage collector frees it."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def _nothing_frozen() -> Iterator[None]:
    assert gc.get_freeze_count() == 0
    switch_interval_s = sys.getswitchinterval()
    yield
    assert gc.get_freeze_count() == 0
    assert sys.getswitchinterval() == switch_interval_s


async def _settled() -> None:
    await asyncio.sleep(SETTLE_S * 1.01)


def test_objects_are_frozen_after_a_quiet_period_and_unfrozen_at_the_end() -> None:
    async def main() -> None:
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

    run_virtual(main)


def test_frozen_garbage_is_freed_at_the_next_change() -> None:
    async def main() -> None:
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

    run_virtual(main)


def test_freezing_can_be_disabled() -> None:
    async def main() -> None:
        with dask.config.set({"daskserve.process": {"gc_freeze": False, "switch_interval_s": None}}):
            tuning = InterpreterTuning()
        switch_interval_s = sys.getswitchinterval()
        tuning.open()
        await _settled()
        assert gc.get_freeze_count() == 0
        assert sys.getswitchinterval() == switch_interval_s
        tuning.close()

    run_virtual(main)
