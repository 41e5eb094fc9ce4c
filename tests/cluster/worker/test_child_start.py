"""A child process that starts while its event loop ends."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import socket
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from daskserve.cluster.worker.child import ChildProcess
from daskserve.options.environment import Interpreter


@pytest.mark.parametrize("turns", [1, 3, 300])
def test_a_start_that_is_cancelled_again_and_again_leaves_no_process(
    turns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its instance closes, and then its event loop."""
    (tmp_path / "slow_child.py").write_text(
        "import time\n\ndef make(start_thread, to_parent):\n    time.sleep(60)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    async def start_and_leave() -> None:
        own = Interpreter(sys.executable, sys.prefix)
        starting = asyncio.ensure_future(ChildProcess.start("b#1", own, "slow_child:make"))
        for _ in range(turns):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.sleep(0)
        starting.cancel()

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        asyncio.run(start_and_leave())
        gc.collect()
    assert [str(each.message) for each in found] == []
    assert caplog.records == []


async def test_a_start_without_free_descriptors_leaves_none_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(socket, "socketpair", fail)
    with pytest.raises(OSError, match="Too many open files"):
        await ChildProcess.start("b#1", Interpreter(sys.executable, sys.prefix), "child:make")
    assert set(os.listdir("/proc/self/fd")) == before
