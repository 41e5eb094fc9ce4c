"""Which lines of code have allocated the memory of a process, by `tracemalloc`."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Sequence
from typing import Any

#: Maximum number of lines in the result, and of frames that are kept of each allocation.
MAX_LINES, FRAMES = 30, 1


class _Tracing:
    """Keeps tracemalloc on while the memory of this process is profiled for any replica."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._profiles = 0
        self._is_ours = False

    def begin(self) -> bool:
        """Switch it on if it is off; return whether other code has switched it on."""
        with self._lock:
            self._profiles += 1
            if not tracemalloc.is_tracing():
                tracemalloc.start(FRAMES)
                self._is_ours = True
            return not self._is_ours

    def end(self) -> None:
        """Switch it off after the last profile, unless other code has switched it on."""
        with self._lock:
            self._profiles -= 1
            if self._is_ours and not self._profiles:
                tracemalloc.stop()
                self._is_ours = False


#: It is module-level state because tracemalloc's state is as well.
_TRACING = _Tracing()


def trace_memory(seconds: float, stop: threading.Event) -> dict[str, Any]:
    """Return the memory that each line of code has allocated and not freed, after some time.

    If tracemalloc is off, it is switched on for that time, so earlier allocations are unknown. This blocks;
    call it in a separate thread.
    """
    was_on = _TRACING.begin()
    try:
        before = tracemalloc.take_snapshot() if was_on else None
        stop.wait(seconds)
        size, peak = tracemalloc.get_traced_memory()
        after = tracemalloc.take_snapshot()
    except RuntimeError:  # other code has switched tracing off
        return {"was_on": was_on, "was_ended": True, "lines": [], "traced_bytes": 0, "peak_bytes": 0}
    finally:
        _TRACING.end()
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
