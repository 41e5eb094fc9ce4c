"""Encoding and replay of journal objects, without files."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskserve.cluster.store.journal import (
    MAGIC,
    START,
    DamagedError,
    History,
    JournalEntry,
    Position,
    Snapshot,
    decode_change,
    decode_snapshot,
    encode_change,
    encode_snapshot,
    replay,
)
from daskserve.cluster.store.opening import StoreFormatError

RECORDS: dict[str, bytes | None] = {"backend/b": b"12345", "gone": None, "ünïcødé": b"", "": b"\x00"}
CHANGE = JournalEntry(Position(2, 7), Position(1, 3), RECORDS)
SNAPSHOT = Snapshot(Position(3, 4), {"a": b"A" * 100, "b": b"B" * 100, "c": b"C" * 100})


def change(epoch: int, number: int, after: Position, **records: bytes | None) -> JournalEntry:
    return JournalEntry(Position(epoch, number), after, records)


def test_changes_and_snapshots_round_trip() -> None:
    assert decode_change("u", encode_change(CHANGE, "w")) == CHANGE
    assert decode_snapshot("u", encode_snapshot(SNAPSHOT, "w")) == SNAPSHOT


def test_equal_changes_of_two_writers_encode_differently() -> None:
    assert encode_change(CHANGE, "one") != encode_change(CHANGE, "two")


@given(epoch=st.integers(0, 10**9), number=st.integers(0, 10**12))
def test_a_position_is_parsed_from_its_name(epoch: int, number: int) -> None:
    assert Position.parse(Position(epoch, number).name) == (epoch, number)


def test_names_sort_in_the_order_of_positions() -> None:
    positions = [Position(1, 9), Position(1, 10), Position(9, 1), Position(10, 1)]
    assert sorted(each.name for each in positions) == [each.name for each in positions]


def test_other_names_parse_to_none() -> None:
    for name in ["", "1", "1-", "-1", "a-1", "1-1.tmp", "x1-1", "00000001-0000000001 "]:
        assert Position.parse(name) is None, name


# ---- damage


@given(data=st.data())
def test_an_altered_change_is_never_applied(data: st.DataObject) -> None:
    whole = encode_change(CHANGE, "w")
    at = data.draw(st.integers(0, len(whole) - 1))
    cut_off = whole[:at]
    flipped = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    for damaged in (cut_off, flipped):
        with pytest.raises(DamagedError):
            decode_change("u", damaged)


@given(data=st.data())
def test_the_readable_records_of_a_damaged_snapshot_are_unchanged(data: st.DataObject) -> None:
    whole = encode_snapshot(SNAPSHOT, "w")
    at = data.draw(st.integers(0, len(whole) - 1))
    cut_off = whole[:at]
    flipped = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    for damaged in (cut_off, flipped):
        try:
            found = decode_snapshot("u", damaged)
        except DamagedError:
            continue
        assert found.damaged
        assert found.records.items() <= SNAPSHOT.records.items()
        assert len(found.records) + len(found.damaged) == 3


def test_the_damaged_records_of_a_snapshot_are_named() -> None:
    data = encode_snapshot(SNAPSHOT, "w").replace(b"BBBB", b"B?BB", 1)
    found = decode_snapshot("u", data)
    assert found.damaged == ("'b'",)
    assert sorted(found.records) == ["a", "c"]


def test_the_error_for_an_invalid_change_names_the_reason() -> None:
    for data, reason in [
        (b"", "it is empty"),
        (b"something else", "does not start with daskserve's magic line"),
        (MAGIC, "cut off"),
        (encode_snapshot(SNAPSHOT, "w"), "it holds a snapshot, not a change"),
    ]:
        with pytest.raises(DamagedError, match=reason):
            decode_change("u", data)


def test_a_newer_format_is_not_reported_as_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daskserve.cluster.store.journal.FORMAT", 2)
    newer = encode_change(CHANGE, "w")
    monkeypatch.undo()
    assert msgpack.unpackb(newer[len(MAGIC) + 8 :][: newer[len(MAGIC) + 3]])["format"] == 2
    with pytest.raises(StoreFormatError, match="u has format 2; this daskserve reads formats up to 1"):
        decode_change("u", newer)


# ---- replay


def test_replaying_nothing_gives_an_empty_history() -> None:
    assert replay(None, []) == History({}, START)


def test_changes_are_applied_in_the_order_of_their_positions() -> None:
    changes = [
        change(2, 1, Position(1, 2), a=None, c=b"3"),
        change(1, 1, START, a=b"1", b=b"1"),
        change(1, 2, Position(1, 1), b=b"2"),
    ]
    assert replay(None, changes) == History({"b": b"2", "c": b"3"}, Position(2, 1))


def test_a_snapshot_replaces_the_changes_up_to_it() -> None:
    base = Snapshot(Position(1, 2), {"a": b"1"})
    changes = [
        change(1, 1, START, a=b"0", z=b"0"),
        change(1, 2, Position(1, 1), a=b"1", z=None),
        change(1, 3, Position(1, 2), b=b"2"),
    ]
    assert replay(base, changes) == History({"a": b"1", "b": b"2"}, Position(1, 3))
    assert replay(base, []) == History({"a": b"1"}, Position(1, 2))


def test_a_late_write_of_a_replaced_controller_is_not_in_the_history() -> None:
    changes = [
        change(1, 1, START, a=b"1"),
        change(1, 2, Position(1, 1), a=b"late"),
        change(1, 3, Position(1, 2), a=b"later"),
        change(2, 1, Position(1, 1), b=b"2"),
        change(2, 2, Position(2, 1), c=b"3"),
    ]
    assert replay(None, changes) == History({"a": b"1", "b": b"2", "c": b"3"}, Position(2, 2))


def test_a_void_change_voids_no_other_change() -> None:
    changes = [
        change(1, 1, START, a=b"1"),
        change(1, 2, Position(1, 1), b=b"2"),
        change(2, 1, Position(1, 1), c=b"void, and what it voided is not"),
        change(3, 1, Position(1, 2), d=b"4"),
    ]
    assert replay(None, changes) == History({"a": b"1", "b": b"2", "d": b"4"}, Position(3, 1))


def test_a_missing_change_loses_only_itself() -> None:
    changes = [
        change(1, 1, START, a=b"1"),
        change(1, 3, Position(1, 2), c=b"3"),
    ]
    assert replay(None, changes) == History({"a": b"1", "c": b"3"}, Position(1, 3))
