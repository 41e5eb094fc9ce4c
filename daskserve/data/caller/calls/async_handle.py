"""The classic system's handle for event loops, whose calls are coroutines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from daskserve.data.caller.calls.handle import Handle
from daskserve.data.caller.calls.response import Response


class AsyncHandle(Handle):
    """A handle whose ``remote`` is a coroutine that starts the call and returns its `Response`.

    ``get_handle(name, sync=False)`` of the classic API returns one: ``await (await handle.remote(1))``.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, super().__reduce__())

    def options(self, **changes: Any) -> Any:
        """Return a copy with changed options, like `Handle.options`; streams have only one form."""
        changed = super().options(**changes)
        return awaited(changed) if type(changed) is Handle else changed

    async def remote(self, /, *args: Any, **kwargs: Any) -> Response:  # type: ignore[override]
        """Start a call and return its `Response`, which can be awaited; otherwise like `Handle.remote`."""
        return super().remote(*args, **kwargs)

    def _plain(self) -> Handle:
        plain = Handle.__new__(Handle)
        vars(plain).update(vars(self))
        return plain


def awaited(handle: Handle) -> AsyncHandle:
    """Return the same handle in the form for event loops."""
    copy = AsyncHandle.__new__(AsyncHandle)
    vars(copy).update(vars(handle))
    return copy


def _rebuild(function: Callable[..., Handle], arguments: tuple[Any, ...]) -> AsyncHandle:
    return awaited(function(*arguments))
