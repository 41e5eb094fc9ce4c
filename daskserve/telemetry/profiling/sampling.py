"""A sampling profiler: it reads the stacks of some threads a hundred times a second.

Problem: a tracing profiler slows user code down several times, and has to be switched on before it runs.
Choice: a thread reads the stacks of the other threads. User code is affected only for the time that the
reading holds the interpreter lock. The profiler counts that time, and reads less often where stacks are deep
or many, so that it takes at most `MAX_SHARE` of one processor.

Only stacks with user code count; they begin at its first frame. A thread that waits for its next job has no
such stack.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from daskserve.common.clock import processor_time, stopwatch
from daskserve.common.formatting import encodable
from daskserve.telemetry.profiling.frames import UserFrames
from daskserve.telemetry.profiling.threads import processor_times, stack_frames

#: The interval of samples, and the share of a processor that the profiler may take.
INTERVAL_S, MAX_SHARE = 0.01, 0.05
#: Maximum number of different stacks that are kept; further stacks are only counted.
MAX_STACKS = 4000
#: Maximum number of frames of a stack that are kept; the outermost are kept.
MAX_DEPTH = 150
#: Maximum number of lines of code in the result.
MAX_LINES = 50
#: The part of an interval that a thread has to be on a processor for a sample to count as running.
RUNS_PART = 0.3
#: Maximum length of a name.
MAX_NAME = 200
#: The labels of the threads of an executor.
LOOP, THREADS = "event loop", "threads"


@dataclass(frozen=True, slots=True)
class CodeThread:
    """A thread that may run user code.

    Attributes
    ----------
    label : str
        The purpose of the thread; samples of threads with the same label are added up.
    native_id : int or None
        Its number in the operating system.
    """

    label: str
    native_id: int | None = None


#: Returns the threads to sample, by their idents in Python.
FindThreads = Callable[[], Mapping[int, CodeThread]]


class Samples:
    """The samples so far."""

    def __init__(self) -> None:
        #: Number of samples with user code, without user code, and not kept.
        self.busy = self.idle = self.dropped = 0
        self._frames = UserFrames()
        self._stacks: dict[tuple[str, tuple[CodeType, ...]], list[int]] = {}
        self._lines: Counter[tuple[CodeType, int]] = Counter()
        #: When each thread was last seen on a processor.
        self._ran_s: dict[int, float] = {}

    def add(self, thread: CodeThread, frame: FrameType | None, elapsed_s: float) -> None:
        """Add a sample of a thread's stack, taken ``elapsed_s`` after the one before."""
        stack = self._frames.stack(frame)
        if not stack or frame is None:
            self.idle += 1
            return
        self.busy += 1
        self._lines[frame.f_code, frame.f_lineno or 0] += 1
        key = thread.label, tuple(each.f_code for each in stack[:MAX_DEPTH])
        counts = self._stacks.get(key)
        if counts is None:
            if len(self._stacks) >= MAX_STACKS:
                self.dropped += 1
                return
            counts = self._stacks[key] = [0, 0]
        counts[0] += 1
        counts[1] += self._runs(thread, elapsed_s)

    def _runs(self, thread: CodeThread, elapsed_s: float) -> bool:
        """Return whether a thread was on a processor since its last sample, or this is unknown."""
        times = processor_times(thread.native_id)
        if times is None or thread.native_id is None:
            return True
        before, self._ran_s[thread.native_id] = self._ran_s.get(thread.native_id), times[0]
        return before is not None and times[0] - before >= RUNS_PART * elapsed_s

    def plain(self) -> dict[str, Any]:
        """Return the samples in plain values: each function once, and stacks as lists of function numbers."""
        numbers: dict[Any, int] = {}
        functions: list[list[Any]] = []

        def number(key: Any, name: str, file: str, line: int) -> int:
            if key not in numbers:
                numbers[key] = len(functions)
                functions.append([encodable(name[:MAX_NAME]), encodable(file), line])
            return numbers[key]

        stacks = [
            [
                [
                    number(label, label, "", 0),
                    *(
                        number(each, each.co_qualname, each.co_filename, each.co_firstlineno)
                        for each in codes
                    ),
                ],
                *counts,
            ]
            for (label, codes), counts in self._stacks.items()
        ]
        lines = [
            [encodable(code.co_filename), line, code.co_qualname[:MAX_NAME], count]
            for (code, line), count in self._lines.most_common(MAX_LINES)
        ]
        return {
            "functions": functions,
            "stacks": stacks,
            "lines": lines,
            "busy": self.busy,
            "idle": self.idle,
            "dropped": self.dropped,
        }


def sample_threads(
    find_threads: FindThreads,
    seconds: float,
    stop: threading.Event,
    *,
    interval_s: float = INTERVAL_S,
) -> dict[str, Any]:
    """Read stacks for some time, or until ``stop`` is set; return the profile in plain values.

    This blocks; call it in a separate thread.
    """
    samples, ticks = Samples(), 0
    began = last = stopwatch()
    cost_s = spent_s = processor_time()
    pause_s = interval_s
    while not stop.wait(pause_s) and (now := stopwatch()) - began < seconds:
        found = stack_frames()
        for ident, thread in find_threads().items():
            samples.add(thread, found.get(ident), now - last)
        del found  # frames keep values of user code alive
        ticks += 1
        last = now
        took_s, spent_s = processor_time() - spent_s, processor_time()
        pause_s = max(interval_s, took_s / MAX_SHARE) - took_s
    seconds = max(stopwatch() - began, 1e-9)
    return {
        **samples.plain(),
        "seconds": round(seconds, 3),
        "interval_s": interval_s,
        "ticks": ticks,
        "overhead": round((spent_s - cost_s) / seconds, 4),
    }
