"""Errors as shown to users: with the frames of user code, and without those of daskserve.

The error's message, and the traceback of the process where it was raised, show what has failed; the traceback
is the error's cause. When a function of daskserve returns to its caller, the frames of daskserve in this
process are removed; ``daskserve.errors.full-tracebacks`` keeps them. One frame remains, because Python adds
it later; a notebook does not show it.

An unexpected error is a bug in daskserve, and keeps its frames for the bug report.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Coroutine
from types import FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

from daskserve.common import settings
from daskserve.errors import RemoteTraceback, ServeError
from daskserve.internals import ipython
from daskserve.payload.error_text import causes_of, frames_of, traceback_of

P = ParamSpec("P")
T = TypeVar("T")
ErrorT = TypeVar("ErrorT", bound=BaseException)

#: The top-level packages whose frames are left out of tracebacks for users.
ON_THE_WAY = frozenset(
    {"daskserve", "asyncio", "concurrent", "contextlib", "functools", "importlib", "pydantic"}
)
#: Maximum number of lines that are shown of a traceback from another process.
MAX_LINES = 14
#: Number of these lines that are taken from the beginning.
HEAD_LINES = 3


def shown(error: ErrorT) -> ErrorT:
    """Return an error as the user should see it, to be raised where daskserve returns to its caller."""
    if isinstance(error, ServeError) and error.user_traceback:
        error.__cause__ = cause_of(error)
    if isinstance(error, ServeError):
        _add_address(error)
    if not settings.errors().full_tracebacks:
        _leave_out(error)
    return shown_in_notebook(error)


def _add_address(error: ServeError) -> None:
    """Add the address of the error's section in the documentation as a note, if there is a site."""
    site = settings.errors().site
    note = f"See {(site or '').rstrip('/')}/errors.html#{type(error).__name__.lower()}"
    if site and note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def _leave_out(error: BaseException) -> None:
    """Remove the frames of daskserve, and causes of its errors that have no other frames."""
    for each in list(causes_of(error)):
        each.__traceback__ = users_frames(each)
        if isinstance(each, ServeError) and type(each.__cause__) is not RemoteTraceback:
            cause = each.__cause__
            each.__cause__ = None if cause is None or not _has_users_frames(cause) else cause


def _has_users_frames(error: BaseException) -> bool:
    return any(_package_of(each.tb_frame) not in ON_THE_WAY for each in frames_of(error.__traceback__))


def shown_in_notebook(error: ErrorT) -> ErrorT:
    """Return an error that IPython, if the code runs there, shows without frames of daskserve."""
    if ipython.shell() is not None:
        for each in causes_of(error):
            if type(each) is RemoteTraceback and each.args:
                each.args = (ipython.with_cell_lines(each.args[0]),)
        error._render_traceback_ = render_last  # type: ignore[attr-defined]
    return error


def render_last() -> list[str]:
    """Return the lines with which IPython shows the error that it has stored as the last one."""
    error = sys.last_value
    assert error is not None
    if not settings.errors().full_tracebacks:
        error.__traceback__ = users_frames(error)
    return ipython.structured_traceback(error)


def shows_errors(
    function: Callable[P, Coroutine[Any, Any, T]],
) -> Callable[P, Coroutine[Any, Any, T]]:
    """Return a coroutine function whose errors are `shown`."""

    @functools.wraps(function)
    async def showing(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await function(*args, **kwargs)
        except Exception as error:
            raise shown(error)  # noqa: B904 (it is the same error)

    return showing


def cause_of(error: ServeError) -> RemoteTraceback | None:
    """Return the cause to show for an error of daskserve: the traceback of user code, if there is one."""
    return RemoteTraceback(shortened(error.user_traceback)) if error.user_traceback else None


def shortened(text: str) -> str:
    """Return a traceback as text; a long one without its middle, which consists of library frames."""
    lines = text.rstrip().split("\n")
    left_out = len(lines) - MAX_LINES + 1
    if left_out > 1:
        lines[HEAD_LINES : HEAD_LINES + left_out] = [f"  ... {left_out} lines ..."]
    return "\n".join(lines)


def users_frames(error: BaseException) -> TracebackType | None:
    """Return an error's traceback without the frames that lead through daskserve."""
    frames = list(frames_of(error.__traceback__))
    packages = [_package_of(each.tb_frame) for each in frames]
    first = packages.index("daskserve") if "daskserve" in packages else len(frames)
    kept = [each for n, each in enumerate(frames) if n < first or packages[n] not in ON_THE_WAY]
    is_meant = isinstance(error, ServeError) or any(
        type(each) is RemoteTraceback for each in causes_of(error)
    )
    if not is_meant and first < len(frames) and ON_THE_WAY.issuperset(packages[first:]):
        if not isinstance(error, (TypeError, ValueError, TimeoutError)):
            return error.__traceback__
        kept.append(frames[-1])  # the line that raised the error, in case of a bug
    return traceback_of(kept)


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
