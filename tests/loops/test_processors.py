"""Threads that follow other threads to their processors."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from daskserve.loops.processors import Follower


@pytest.mark.skipif(sys.platform != "linux", reason="threads are moved on Linux only")
def test_a_thread_follows_another_one_until_it_is_released() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    assert thread.native_id is not None
    own = os.sched_getaffinity(0)
    follower = Follower(thread.native_id)
    try:
        for processor in sorted(own):
            os.sched_setaffinity(0, {processor})
            follower.follow()
            assert os.sched_getaffinity(thread.native_id) == {processor}
        os.sched_setaffinity(0, own)
        follower.release()
        assert os.sched_getaffinity(thread.native_id) == own
    finally:
        os.sched_setaffinity(0, own)
        end.set()
        thread.join()
    for _ in range(3):  # it has ended, and nothing is raised
        follower.follow()
        follower.release()
