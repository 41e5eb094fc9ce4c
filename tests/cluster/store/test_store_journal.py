"""What journal objects hold and what they amount to, without any file."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskserve.cluster.store.journal import (
    MAGIC,
    START,
    Change,
    DamagedError,
    History,
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
CHANGE = Change(Position(2, 7), Position(1, 3), RECORDS)
SNAPSHOT = Snapshot(Position(3, 4), {"a": b"A" * 100, "b": b"B" * 100, "c": b"C" * 100})


def change(epoch: int, number: int, after: Position, **records: bytes | None) -> Change:
    return Change(Position(epoch, number), after, records)


def test_a_change_and_a_snapshot_come_back_as_they_were() -> None:
    assert decode_change("u", encode_change(CHANGE, "w")) == CHANGE
    assert decode_snapshot("u", encode_snapshot(SNAPSHOT, "w")) == SNAPSHOT


def test_equal_changes_of_two_writers_differ() -> None:
    assert encode_change(CHANGE, "one") != encode_change(CHANGE, "two")


@given(epoch=st.integers(0, 10**9), number=st.integers(0, 10**12))
def test_a_position_is_told_by_its_name(epoch: int, number: int) -> None:
    assert Position.parse(Position(epoch, number).name) == (epoch, number)


def test_names_sort_as_positions_do() -> None:
    positions = [Position(1, 9), Position(1, 10), Position(9, 1), Position(10, 1)]
    assert sorted(each.name for each in positions) == [each.name for each in positions]


@pytest.mark.parametrize("name", ["", "1", "1-", "-1", "a-1", "1-1.tmp", "x1-1", "00000001-0000000001 "])
def test_other_names_are_no_positions(name: str) -> None:
    assert Position.parse(name) is None


# ---- damage


@given(data=st.data())
def test_a_change_that_is_not_what_was_written_is_never_applied(data: st.DataObject) -> None:
    whole = encode_change(CHANGE, "w")
    at = data.draw(st.integers(0, len(whole) - 1))
    cut_off = whole[:at]
    flipped = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    for damaged in (cut_off, flipped):
        with pytest.raises(DamagedError):
            decode_change("u", damaged)


@given(data=st.data())
def test_of_a_damaged_snapshot_what_can_be_read_is_as_it_was(data: st.DataObject) -> None:
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


def test_a_damaged_record_of_a_snapshot_is_named() -> None:
    data = encode_snapshot(SNAPSHOT, "w").replace(b"BBBB", b"B?BB", 1)
    found = decode_snapshot("u", data)
    assert found.damaged == ("'b'",)
    assert sorted(found.records) == ["a", "c"]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "it is empty"),
        (b"something else", "does not begin as daskserve's objects do"),
        (MAGIC, "cut off"),
        (encode_snapshot(SNAPSHOT, "w"), "it holds a snapshot, not a change"),
    ],
)
def test_what_is_no_change_is_told_why(data: bytes, reason: str) -> None:
    with pytest.raises(DamagedError, match=reason):
        decode_change("u", data)


def test_an_object_of_a_newer_format_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daskserve.cluster.store.journal.FORMAT", 2)
    newer = encode_change(CHANGE, "w")
    monkeypatch.undo()
    assert msgpack.unpackb(newer[len(MAGIC) + 8 :][: newer[len(MAGIC) + 3]])["format"] == 2
    with pytest.raises(StoreFormatError, match="u has format 2; this daskserve reads formats up to 1"):
        decode_change("u", newer)


# ---- what they amount to


def test_nothing_amounts_to_nothing() -> None:
    assert replay(None, []) == History({}, START)


def test_changes_count_in_the_order_of_their_positions() -> None:
    changes = [
        change(2, 1, Position(1, 2), a=None, c=b"3"),
        change(1, 1, START, a=b"1", b=b"1"),
        change(1, 2, Position(1, 1), b=b"2"),
    ]
    assert replay(None, changes) == History({"b": b"2", "c": b"3"}, Position(2, 1))


def test_a_snapshot_stands_for_the_changes_up_to_it() -> None:
    base = Snapshot(Position(1, 2), {"a": b"1"})
    changes = [
        change(1, 1, START, a=b"0", z=b"0"),
        change(1, 2, Position(1, 1), a=b"1", z=None),
        change(1, 3, Position(1, 2), b=b"2"),
    ]
    assert replay(base, changes) == History({"a": b"1", "b": b"2"}, Position(1, 3))
    assert replay(base, []) == History({"a": b"1"}, Position(1, 2))


def test_a_late_write_of_a_controller_that_was_replaced_is_no_part_of_the_history() -> None:
    changes = [
        change(1, 1, START, a=b"1"),
        change(1, 2, Position(1, 1), a=b"late"),
        change(1, 3, Position(1, 2), a=b"later"),
        change(2, 1, Position(1, 1), b=b"2"),
        change(2, 2, Position(2, 1), c=b"3"),
    ]
    assert replay(None, changes) == History({"a": b"1", "b": b"2", "c": b"3"}, Position(2, 2))


def test_what_a_write_that_was_passed_over_passed_over_counts() -> None:
    changes = [
        change(1, 1, START, a=b"1"),
        change(1, 2, Position(1, 1), b=b"2"),
        change(2, 1, Position(1, 1), c=b"void, and what it voided is not"),
        change(3, 1, Position(1, 2), d=b"4"),
    ]
    assert replay(None, changes) == History({"a": b"1", "b": b"2", "d": b"4"}, Position(3, 1))


def test_a_change_that_is_missing_costs_itself_only() -> None:
    changes = [
        change(1, 1, START, a=b"1"),
        change(1, 3, Position(1, 2), c=b"3"),
    ]
    assert replay(None, changes) == History({"a": b"1", "c": b"3"}, Position(1, 3))
