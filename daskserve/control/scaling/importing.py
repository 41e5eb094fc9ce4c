"""Describe where a thread hangs while it imports user code, and what to do about it.

Python has an import lock per module name. The importing thread holds it until the module's code has run, and
other threads that import the module wait without a timeout. Python only detects deadlocks: if two threads
wait for each other's module, one of them continues with a partially initialised module. Code that waits for
anything else is not detected. The lock belongs to the name, so neither `importlib.invalidate_caches` nor
removing the module from `sys.modules` releases it. A module that hangs can therefore not be replaced by a
fixed module of the same name in the same process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from threading import Thread
from types import FrameType

_MACHINERY = "<frozen importlib."
#: Functions of the import machinery that import the module ``name``, or wait for another thread to do so.
_IMPORTING = ("_find_and_load", "_lock_unlock_module")
REMEDY = (
    "this process cannot import another module of that name, so deploy the fixed policy in a module with a "
    "different name, or restart the worker that status() shows for the controller with the Dask client's "
    "restart_workers()"
)


def thread_location(thread: Thread) -> str:
    """Describe a thread's code location, and a remedy if it is importing; "" if the thread has ended."""
    innermost = sys._current_frames().get(thread.ident or 0)
    frames = list(_outwards(innermost))
    if not frames:
        return ""
    # The modules that the thread is importing, innermost first.
    names = [str(each.f_locals.get("name")) for each in frames if _is_machinery(each, *_IMPORTING)]
    if names and _is_machinery(frames[0], "acquire"):
        return f"an earlier import of {names[0]} has not ended; {REMEDY}"
    place = next((frame for frame in frames if not _is_of_python(frame)), frames[0])
    text = f"it is at {place.f_code.co_filename}:{place.f_lineno}"
    return f"{text}, importing {' for '.join(names)}; if the import hangs, {REMEDY}" if names else text


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_of_python(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith("<frozen ") or (
        file.startswith(os.path.dirname(os.__file__)) and "site-packages" not in file
    )


def _is_machinery(frame: FrameType, *names: str) -> bool:
    return frame.f_code.co_name in names and frame.f_code.co_filename.startswith(_MACHINERY)
