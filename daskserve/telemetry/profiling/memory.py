"""Which lines of code have allocated the memory of a process, by `tracemalloc`."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Sequence
from typing import Any

#: Lines that are named, and frames of each allocation that are kept.
MAX_LINES, FRAMES = 30, 1


def trace_memory(seconds: float, stop: threading.Event) -> dict[str, Any]:
    """Return what the lines of this process have allocated and not freed, after some time.

    If tracemalloc is not on, it is on for that time only: then what was allocated before is unknown. Call
    this in a thread of its own.
    """
    was_on = tracemalloc.is_tracing()
    if not was_on:
        tracemalloc.start(FRAMES)
    try:
        before = tracemalloc.take_snapshot() if was_on else None
        stop.wait(seconds)
        if not tracemalloc.is_tracing():  # someone else has ended it
            return {"was_on": was_on, "was_ended": True, "lines": [], "traced_bytes": 0, "peak_bytes": 0}
        size, peak = tracemalloc.get_traced_memory()
        after = tracemalloc.take_snapshot()
    finally:
        if not was_on:
            tracemalloc.stop()
    own = [tracemalloc.Filter(False, tracemalloc.__file__), tracemalloc.Filter(False, __file__)]
    after = after.filter_traces(own)
    lines: Sequence[Any] = (
        after.statistics("lineno")
        if before is None
        else after.compare_to(before.filter_traces(own), "lineno")
    )
    rows = [
        [
            each.traceback[0].filename,
            each.traceback[0].lineno,
            each.size,
            each.count,
            getattr(each, "size_diff", each.size),
        ]
        for each in sorted(lines, key=lambda each: -each.size)[:MAX_LINES]
    ]
    return {
        "was_on": was_on,
        "was_ended": False,
        "lines": rows,
        "traced_bytes": size,
        "peak_bytes": peak,
    }
