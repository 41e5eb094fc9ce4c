"""Which frames of a stack are user code."""

from __future__ import annotations

import sys
from types import CodeType, FrameType

#: Packages that call user code.
_RESPONDERS = frozenset({"asyncio", "daskserve"})
#: Packages that daskserve itself uses.
_OWN = _RESPONDERS | {"cloudpickle", "distributed", "msgpack", "pydantic", "tornado", "uvicorn", "uvloop"}
#: Maximum number of code objects in the cache.
MAX_KINDS = 20_000


def package_of(frame: FrameType) -> str:
    """Return the name of the top package of a frame's code."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def is_users(frame: FrameType) -> bool:
    """Return whether a frame belongs to user code, or to a library that only user code uses."""
    package = package_of(frame)
    return package not in _OWN and package not in sys.stdlib_module_names


def user_call(frame: FrameType | None) -> FrameType | None:
    """Return the outermost frame of the user code on a stack; None if only libraries are on the stack."""
    found = None
    while frame is not None:
        caller = frame.f_back
        if caller is not None and package_of(caller) in _RESPONDERS and is_users(frame):
            found = frame
        frame = caller
    return found


class UserFrames:
    """Finds where user code begins on many stacks; it caches its findings by code object.

    The first other code that asyncio or daskserve calls is user code. In a thread that user code has started,
    the thread's function is user code. The main module of a process is not user code, because nothing calls
    it.
    """

    def __init__(self) -> None:
        #: For each code object: whether it is user code, and whether it calls user code.
        self._kinds: dict[CodeType, tuple[bool, bool]] = {}

    def stack(self, frame: FrameType | None) -> list[FrameType]:
        """Return a stack from the first frame of user code on, outermost first; empty if there is none."""
        found: list[FrameType] = []
        called = started = 0
        is_users_frame = False
        while frame is not None:
            is_own, calls = self._kind_of(frame)
            if is_users_frame:  # the previous frame is user code, and this one calls it
                started = len(found)
                if calls:
                    called = started
            found.append(frame)
            is_users_frame = is_own
            frame = frame.f_back
        return found[: called or started][::-1]

    def _kind_of(self, frame: FrameType) -> tuple[bool, bool]:
        known = self._kinds.get(frame.f_code)
        if known is None:
            if len(self._kinds) >= MAX_KINDS:
                self._kinds.clear()
            known = self._kinds[frame.f_code] = is_users(frame), package_of(frame) in _RESPONDERS
        return known
