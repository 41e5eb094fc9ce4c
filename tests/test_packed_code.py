"""Packing of user code with large constructor arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
from cases import for_each

from daskserve.common.types import SHARED_BYTES
from daskserve.payload.parcels import ALIGNMENT, Parcel, pack_code, unpack_code
from daskserve.payload.pickling import dump_bytes


def test_small_code_stands_for_itself() -> None:
    value = ("pkg.mod:Name", (np.arange(10),), {"text": "x" * 1000})
    code, parts = pack_code(value)
    assert parts == ()
    assert code == dump_bytes(value)
    assert Parcel.labelled(code) is None


@for_each("argument", [np.zeros(SHARED_BYTES, np.uint8), b"\1" * SHARED_BYTES])
def test_large_code_has_a_short_label(argument: Any) -> None:
    code, parts = pack_code(("name", (argument,), {}))
    parcel = Parcel.labelled(code)
    assert parcel is not None
    assert len(code) < 200
    assert parcel.label() == code
    content = bytearray(parcel.size_bytes)
    for start, part in zip(parcel.starts(), parts, strict=True):
        assert start % ALIGNMENT == 0
        content[start : start + memoryview(part).nbytes] = part
    _, (found,), _ = unpack_code(code, parcel.split(memoryview(content)))
    assert bytes(found) == bytes(argument)


def test_arrays_in_a_parcel_are_not_copied_and_read_only() -> None:
    code, parts = pack_code((None, (np.ones(SHARED_BYTES, np.uint8),), {}))
    _, (array,), _ = unpack_code(code, [bytearray(memoryview(each)) for each in parts])
    assert not array.flags.owndata
    assert not array.flags.writeable


def test_a_label_depends_on_the_content_only() -> None:
    def label(fill: int) -> bytes:
        return pack_code((None, (np.full(SHARED_BYTES, fill, np.uint8),), {}))[0]

    assert label(1) == label(1) != label(2)
