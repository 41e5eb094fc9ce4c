"""Memory that an unpickled value shares with the original."""

from __future__ import annotations

import numpy as np
from tables import each_case

from daskserve.common.types import SHARED_BYTES
from daskserve.payload.copies import offer, withdraw
from daskserve.payload.pickling import dump


@each_case("length", [10, 1_000, SHARED_BYTES // 8 - 1])
def test_later_changes_of_an_array_have_no_effect(length: int) -> None:
    array = np.zeros(length)
    payload = dump([array])
    array[:] = 1
    (loaded,) = payload.load()
    assert not loaded.any()
    loaded[0] = 2  # it belongs to its receiver
    assert array[0] == 1


def test_a_small_array_stays_read_only() -> None:
    array = np.zeros(1_000)
    array.flags.writeable = False
    assert not dump(array).load().flags.writeable


@each_case("shape", [(SHARED_BYTES // 8,), (2, SHARED_BYTES // 8)])
def test_later_changes_of_a_large_array_have_no_effect(shape: tuple[int, ...]) -> None:
    array = np.zeros(shape)
    payload = dump([array, array.T])
    array[:] = 1
    for loaded in payload.load():
        assert not loaded.any()
        assert not loaded.flags.writeable


def test_a_large_array_that_cannot_change_is_not_copied() -> None:
    array = np.zeros(SHARED_BYTES // 8)
    array.flags.writeable = False
    assert np.shares_memory(dump(array).load(), array)
    part = np.zeros(SHARED_BYTES // 4)[1:]
    part.flags.writeable = False  # but the array that it is a part of is writable
    assert not np.shares_memory(dump(part).load(), part)
    received = np.frombuffer(bytes(SHARED_BYTES), np.uint8)
    assert np.shares_memory(dump(received).load(), received)


def test_a_value_that_is_final_is_not_copied() -> None:
    array = np.zeros(SHARED_BYTES // 8)
    loaded = dump(array, is_final=True).load()
    assert np.shares_memory(loaded, array)
    assert not loaded.flags.writeable


class Copier:
    """Copies into memory of its own, or has none."""

    def __init__(self, *, has_memory: bool = True) -> None:
        self.copies: list[memoryview] = []
        self.has_memory = has_memory

    def copy(self, data: memoryview) -> memoryview | None:
        if not self.has_memory:
            return None
        self.copies.append(memoryview(bytes(data)))
        return self.copies[-1]


@each_case("has_memory", [True, False])
def test_large_arrays_are_copied_to_the_memory_that_is_offered(has_memory: bool) -> None:
    copier = Copier(has_memory=has_memory)
    offer(copier.copy)
    try:
        array = np.zeros(SHARED_BYTES // 8)
        payload = dump([np.zeros(SHARED_BYTES // 8 - 1), array])
        array[:] = 1
        assert [each in payload.buffers for each in copier.copies] == [True] * has_memory
        assert not payload.load()[1].any()
    finally:
        withdraw(copier.copy)
    dump(array)
    assert len(copier.copies) == has_memory
