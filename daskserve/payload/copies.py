"""Copies of large buffers, so that later changes of the original do not change what was sent.

Problem: a program that fills an array again once ``remote`` has returned must not change the arguments of the
call, which may be sent later, or never if the replica is in the same process. A copy for the call and a
second copy to shared memory would double the time of a call. Choice: a process that shares memory with others
offers a function that copies straight into shared memory; the message then refers to that copy.

A buffer that cannot change is not copied: ``bytes``, what was received, and read-only arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeAlias
from weakref import WeakMethod

#: Returns a read-only copy of a buffer, or the buffer itself if it cannot change; None if there is no memory.
#: Any thread may call it.
Copy: TypeAlias = Callable[[memoryview], memoryview | None]


def offer(copy: Copy) -> None:
    """Copy large buffers of this process with a method, until `withdraw` or the end of its object."""
    offered = _offered()
    offered.add(WeakMethod(copy, offered.discard))


def withdraw(copy: Copy) -> None:
    """Undo `offer`."""
    _offered().discard(WeakMethod(copy))


@cache
def _offered() -> set[WeakMethod[Copy]]:
    return set()


def copy_of(data: memoryview) -> memoryview:
    """Return a read-only copy of a contiguous buffer; the buffer itself if it cannot change."""
    if is_frozen(data):
        return data
    for each in list(_offered()):
        copy = each()
        found = copy and copy(data)
        if found is not None:
            return found
    return memoryview(bytes(data))


def is_frozen(data: memoryview) -> bool:
    """Return whether no object that holds the memory of a buffer can write to it."""
    return data.readonly and all(_is_read_only(each) for each in holders(data))


def _is_read_only(holder: Any) -> bool:
    try:
        return memoryview(holder).readonly
    except TypeError:  # it has no buffer
        return False


def holders(view: memoryview) -> Iterator[Any]:
    """Yield the chain of objects that a view keeps alive: views and NumPy arrays."""
    held: Any = view.obj
    while held is not None:
        yield held
        held = held.obj if isinstance(held, memoryview) else getattr(held, "base", None)
