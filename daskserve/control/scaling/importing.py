"""Where a thread hangs while it loads what users wrote, and what to do about it.

Python has a lock for the name of each module. Whoever imports the module holds it until the module's code has
come to its end, and everybody else who imports it waits for that, for as long as it takes. Only circles are
noticed: of two threads that each wait for a module of the other, one goes on with a module half made. Code
that waits for anything else is no circle. Neither `importlib.invalidate_caches` nor taking the module out of
`sys.modules` gives the lock away, as it goes by the name. So a module that hangs cannot be replaced by a
mended one of the same name in the same process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from threading import Thread
from types import FrameType

_MACHINERY = "<frozen importlib."
#: Its functions that import something, or wait until somebody else has, by ``name``.
_IMPORTING = ("_find_and_load", "_lock_unlock_module")
REMEDY = (
    "this process can import nothing else of that name, so deploy the mended policy in a module of another "
    "name, or have the worker restarted that status() names for the controller, by restart_workers() of its "
    "Dask client"
)


def whereabouts(thread: Thread) -> str:
    """Say where a thread is, and if it imports something what to do; nothing if it has ended."""
    innermost = sys._current_frames().get(thread.ident or 0)
    frames = list(_outwards(innermost))
    if not frames:
        return ""
    # What it has begun to import, from the inside out.
    names = [str(each.f_locals.get("name")) for each in frames if _is_machinery(each, *_IMPORTING)]
    if names and _is_machinery(frames[0], "acquire"):
        return f"an earlier import of {names[0]} has not come to its end; {REMEDY}"
    place = next((frame for frame in frames if not _is_of_python(frame)), frames[0])
    text = f"it is at {place.f_code.co_filename}:{place.f_lineno}"
    return f"{text}, importing {' for '.join(names)}; should that hang, {REMEDY}" if names else text


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
