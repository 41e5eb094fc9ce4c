"""The last log lines of replicas, for the status."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from daskserve.cluster.actors import recent_log
from daskserve.cluster.actors.recent_log import (
    ACCESS_LINES,
    LINES,
    REPLICAS,
    LogFile,
    RecentLog,
    open_file,
    read_file,
    read_rows,
)
from daskserve.cluster.worker.child import ChildProcess
from daskserve.cluster.worker.log_thread import LogThread
from daskserve.context import ReplicaContext, current_replica
from daskserve.options.environment import Interpreter
from daskserve.telemetry.logs.records import Access, AccessLine, Tags

NAME = "daskserve.tests.recent_log"


def record(text: str, *args: object) -> logging.LogRecord:
    return logging.LogRecord(NAME, logging.WARNING, "", 0, text, args, None)


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    log = logging.getLogger(NAME)
    log.propagate = False
    yield log
    log.propagate = True


def texts(lines: tuple[str, ...]) -> list[str]:
    return [each.partition(": ")[2] for each in lines]


def test_a_worker_keeps_the_last_lines_of_each_of_its_replicas(log: logging.Logger) -> None:
    recent = RecentLog()
    thread = LogThread(recent=recent)
    thread.open()
    try:
        log.warning("not of a replica")
        for tag in ("b#1", "b#2"):
            token = current_replica.set(ReplicaContext("i", "b", tag))
            for number in range(LINES + 1):
                log.warning("%s says %d\nand more", tag, number)
            current_replica.reset(token)
    finally:
        thread.close()
    found = recent.of("i/replica/b#2")
    assert texts(found) == [f"b#2 says {number} and more" for number in range(1, LINES + 1)]
    assert found[0].endswith(f"WARNING {NAME}: b#2 says 1 and more")
    recent.forget("i/replica/b#2")
    assert recent.of("i/replica/b#2") == ()
    for number in range(REPLICAS):
        recent.take(record("x"), Tags(replica=f"c#{number}"))
    assert recent.of("i/replica/b#1") == ()


def test_the_file_of_a_child_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_log, "FILE_BYTES", 3000)
    monkeypatch.setattr(recent_log, "KEPT_BYTES", 1000)
    descriptor = open_file()
    try:
        file = LogFile(descriptor)
        for number in range(500):
            file.take(record("line %d", number), Tags())
            assert os.fstat(descriptor).st_size <= 3000
        found = texts(read_file(descriptor))
        assert found == [f"line {number}" for number in range(500 - len(found), 500)]
        assert len(found) > 5
    finally:
        os.close(descriptor)


def test_the_file_of_a_child_has_its_access_log() -> None:
    line: AccessLine = (5.0, "CALL", b"g\xe9", b"", 200, 0.1, None, "", "r", "", "", "a/b", "a/b#1", "", "i")
    descriptor = open_file()
    try:
        file = LogFile(descriptor)
        file.take(record("before"), Tags())
        file.take_access([line] * (ACCESS_LINES + 2))
        file.take(record("after"), Tags())
        rows = read_rows(descriptor)
        first = rows[0]["number"]
        assert [each["number"] for each in rows] == [*range(first, first + ACCESS_LINES + 4)]
        assert rows[1] == {**Access(*line).plain(), "number": first + 1}
        assert read_rows(descriptor, after=first + 3) == rows[4:]
        assert texts(read_file(descriptor)) == ["before", "after"]
    finally:
        os.close(descriptor)


FACTORY = """
import logging, os, signal

def make(start_thread, to_parent):
    logging.getLogger("of.the.child").error("it dies of %s", "hunger")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_lines_of_a_child_outlive_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dying_child.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(str(tmp_path))

    async def scenario() -> None:
        child = await ChildProcess.start("b#1", Interpreter(sys.executable, sys.prefix), "dying_child:make")
        await child.ended.wait()
        assert child.exit_reason == "was killed by SIGKILL"
        assert texts(child.last_lines()) == ["it dies of hunger"]
        await child.end()

    asyncio.run(scenario())
