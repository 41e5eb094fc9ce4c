"""The undocumented parts of Python's standard library that daskserve uses."""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import dis
import logging
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from daskserve.internals.checking import PYTHON, needs

with needs(PYTHON, ">=3.11,<3.15") as check:
    from pickle import _Pickler

    PicklerInPython: Any = _Pickler
    check.attributes(asyncio, "_set_running_loop")
    check.attributes(atexit, "_run_exitfuncs")
    check.attributes(weakref.finalize, "_registry")
    check.attributes(PicklerInPython, "dump", "save")
    check.parameters(PicklerInPython.save, "self", "obj", "save_persistent_id")
    check.parameters(logging.Logger.callHandlers, "self", "record")
    check.attributes(ctypes.pythonapi, "PyObject_GetBuffer", "PyBuffer_Release")

#: Passes a record to the handlers of a logger and of its ancestors.
CallHandlers: TypeAlias = Callable[[logging.Logger, logging.LogRecord], None]


def is_from_import(depth: int) -> bool:
    """Return whether the frame ``depth`` levels above the caller runs ``from ... import ...``."""
    caller = sys._getframe(depth + 1)
    return caller.f_code.co_code[caller.f_lasti] == dis.opmap["IMPORT_FROM"]


def run_exit_functions() -> None:
    """Call the functions registered with `atexit`, before `os._exit`."""
    atexit._run_exitfuncs()


def detach_finalizers(function: Callable[..., object]) -> None:
    """Forget all calls of a function that `weakref.finalize` would make."""
    registry: Any = weakref.finalize._registry  # type: ignore[attr-defined]
    for each, info in list(registry.items()):
        if info.func == function:
            each.detach()


@contextmanager
def without_running_loop() -> Iterator[None]:
    """Hide the running event loop from code in a callback, so that it may run another loop."""
    loop = asyncio.get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)


class TracingPickler(PicklerInPython):  # type: ignore[misc]
    """Records its path in a value, to find a part that cannot be pickled; the pickle itself is dropped.

    Parameters
    ----------
    reducers : pickle.Pickler
        Reduces objects that the standard library cannot pickle.
    """

    def __init__(self, reducers: pickle.Pickler) -> None:
        super().__init__(_Nowhere(), pickle.HIGHEST_PROTOCOL)
        self.dispatch_table = reducers.dispatch_table
        self.reducer_override = reducers.reducer_override
        #: The path from the whole value to the part that is being pickled.
        self.path: list[Any] = []

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        """Pickle a part; if that raises, `path` ends with it."""
        self.path.append(obj)
        super().save(obj, save_persistent_id)
        self.path.pop()


class _Nowhere:
    def write(self, data: Any) -> None: ...


def intercept_records(intercept: CallHandlers) -> CallHandlers:
    """Pass all log records of the process to a function; return the function that called the handlers before.

    Levels and filters of loggers apply before the function is called; those of handlers apply when the
    returned function is called.
    """
    original: CallHandlers = logging.Logger.callHandlers
    logging.Logger.callHandlers = intercept  # type: ignore[method-assign, assignment]
    return original


def stop_intercepting(intercept: CallHandlers, original: CallHandlers) -> None:
    """Undo `intercept_records`, unless other code has wrapped the function in the meantime."""
    if logging.Logger.callHandlers is intercept:
        logging.Logger.callHandlers = original  # type: ignore[method-assign, assignment]


class _PyBuffer(ctypes.Structure):
    """``Py_buffer`` of Python's C API."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("holder", ctypes.c_void_p),
        ("size_bytes", ctypes.c_ssize_t),
        ("item_bytes", ctypes.c_ssize_t),
        ("is_read_only", ctypes.c_int),
        ("dimensions", ctypes.c_int),
        ("rest", ctypes.c_void_p * 5),
    )


def address_of(value: Any) -> int:
    """Return the address of the memory of a contiguous buffer, even of a read-only one."""
    found = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(value), ctypes.byref(found), 0)
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(found))
    return found.address or 0
