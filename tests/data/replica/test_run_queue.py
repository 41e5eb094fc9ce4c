"""How long a thread was ready to run without a processor."""

from __future__ import annotations

import threading

from daskserve.data.replica.execution.cpu_wait import starved_s


def test_the_time_of_a_running_thread_is_known_or_zero() -> None:
    first = starved_s(threading.get_native_id())
    assert 0 <= first <= starved_s(threading.get_native_id())


def test_no_thread_waits_for_no_time() -> None:
    assert starved_s(None) == 0
    assert starved_s(0) == 0
