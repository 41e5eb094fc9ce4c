"""Memory that an unpickled value shares with the original."""

from __future__ import annotations

import numpy as np
from tables import each_case

from daskserve.common.types import SHARED_BYTES
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


def test_a_large_array_is_not_copied() -> None:
    array = np.zeros(SHARED_BYTES // 8)
    loaded = dump(array).load()
    assert np.shares_memory(loaded, array)
    assert not loaded.flags.writeable
