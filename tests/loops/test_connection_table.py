"""What a process records of a connection that another one has given to it."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from tables import each_case

from daskserve.loops.connection_table import (
    SLOT_BYTES,
    ConnectionRecord,
    ConnectionState,
    ConnectionTable,
    map_table,
)

HEAD, BODY = b"GET / HTTP/1.1\r\n\r\n", b"x" * 100
LONG = b"y" * SLOT_BYTES
IDLE, BEGUN, FIXED = ConnectionState.IDLE, ConnectionState.BEGUN, ConnectionState.FIXED


def nothing(record: ConnectionRecord) -> None:
    pass


def begins(record: ConnectionRecord) -> None:
    record.add(HEAD)
    record.begin()


def answers(record: ConnectionRecord) -> None:
    begins(record)
    record.fix()


def finishes(record: ConnectionRecord) -> None:
    answers(record)
    record.finish(b"")


def has_next(record: ConnectionRecord) -> None:
    answers(record)
    record.add(BODY)
    record.finish(BODY)
    record.add(HEAD)


def is_too_long(record: ConnectionRecord) -> None:
    record.add(HEAD)
    record.add(LONG)
    record.begin()


def is_answered_too_long(record: ConnectionRecord) -> None:
    is_too_long(record)
    record.finish(HEAD)


def has_too_much_next(record: ConnectionRecord) -> None:
    begins(record)
    record.finish(LONG)


@each_case(
    ("steps", "state", "received"),
    [
        (nothing, IDLE, b""),
        (lambda record: record.add(HEAD[:5]), IDLE, HEAD[:5]),
        (begins, BEGUN, HEAD),
        (answers, FIXED, None),
        (finishes, IDLE, b""),
        (has_next, IDLE, BODY + HEAD),
        (is_too_long, FIXED, None),
        (is_answered_too_long, IDLE, HEAD),
        (has_too_much_next, FIXED, None),
    ],
)
def test_the_giver_reads_what_the_taker_has_recorded(
    steps: Callable[[ConnectionRecord], object], state: ConnectionState, received: bytes | None
) -> None:
    table = ConnectionTable(3)
    memory = map_table(table.fileno())
    for slot in range(3):
        table.reset(slot)
    record = ConnectionRecord(memory, 1)
    steps(record)
    assert table.state(1) == state
    assert record.can_move() is (state == IDLE)
    if received is not None:
        assert table.received(1) == received
    for untouched in (0, 2):
        assert table.state(untouched) == ConnectionState.GIVEN
        assert table.received(untouched) == b""
    table.close()
    memory.close()


def test_a_slot_can_be_used_again() -> None:
    table = ConnectionTable(1)
    memory = map_table(table.fileno())
    begins(ConnectionRecord(memory, 0))
    table.reset(0)
    assert (table.state(0), table.received(0)) == (ConnectionState.GIVEN, b"")
    again = ConnectionRecord(memory, 0)
    again.add(BODY)
    assert (table.state(0), table.received(0)) == (IDLE, BODY)
    table.close()
    memory.close()


def test_a_table_takes_memory_only_for_slots_that_were_written() -> None:
    table = ConnectionTable(10_000)
    table.reset(9_999)
    assert os.fstat(table.fileno()).st_blocks * 512 <= 2 * SLOT_BYTES
    table.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        table.state(0)
