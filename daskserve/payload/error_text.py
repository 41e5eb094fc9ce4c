"""The text of an error, whatever its class does: bounded, encodable, and made even if ``__str__`` fails."""

from __future__ import annotations

import reprlib
import sys
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from daskserve.common import settings
from daskserve.common.formatting import encodable
from daskserve.errors import RemoteTraceback

#: Maximum length of the text of one error, and of a traceback.
MAX_TEXT = 8 * 1024
MAX_TRACEBACK = 64 * 1024
#: Maximum length of one value in a text that is too long otherwise.
MAX_VALUE = 200
#: How many frames of a deep recursion a traceback has: the innermost.
MAX_FRAMES = 500

#: Stands for the text of an error whose class must not be asked, or does not answer.
NO_TEXT = "<its text was not made in time>"

#: How the traceback of an error begins whose cause is one of another process.
_REMOTE = f"{RemoteTraceback.__module__}.{RemoteTraceback.__qualname__}: \n"

#: The first line of a traceback.
_TITLE = "Traceback (most recent call last):\n"

_SIZED = frozenset((str, bytes, bytearray, list, tuple, dict, set, frozenset))

#: The name of a class, and the attributes of an error, as Python stores them, even if the metaclass or the
#: class has other attributes of these names.
name_of = type.__dict__["__name__"].__get__
stored_args = BaseException.__dict__["args"].__get__
stored_attributes = BaseException.__dict__["__dict__"].__get__
stored_traceback = BaseException.__dict__["__traceback__"].__get__
stored_cause = BaseException.__dict__["__cause__"].__get__
stored_context = BaseException.__dict__["__context__"].__get__
is_context_suppressed = BaseException.__dict__["__suppress_context__"].__get__
set_cause = BaseException.__dict__["__cause__"].__set__
set_context = BaseException.__dict__["__context__"].__set__
set_context_suppressed = BaseException.__dict__["__suppress_context__"].__set__


def shortened(text: str, most: int) -> str:
    """Return a text without its middle if it is longer than ``most``."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} ... ({len(text)} characters) ... {text[-half:]}"


def brief(value: Any) -> str:
    """Return the representation of a value, shortened before it is made if the value is built in."""
    if type(value) in (str, bytes, bytearray):
        more = f" ... ({len(value)} in all)" if len(value) > MAX_VALUE else ""
        return f"{value[:MAX_VALUE]!r}{more}"
    found = reprlib.Repr()
    found.maxother = MAX_VALUE
    return found.repr(value)


def text_of(error: BaseException) -> str:
    """Return the text of an error; if its class fails to make one, say so."""
    try:
        if _has_large_text(error):
            args = stored_args(error)
            is_text = type(args[0]) is str
            return encodable(shortened(args[0], MAX_TEXT) if is_text else f"({', '.join(map(brief, args))})")
        # A subclass of `str` may have any methods.
        return encodable(shortened(str.__str__(str(error)), MAX_TEXT))
    except BaseException as failure:  # of user code, which may raise anything here
        return f"<its text cannot be made: {name_of(type(failure))}>"


def summary_of(error: BaseException) -> str:
    """Return the name of an error's class and its text."""
    text = text_of(error)
    name = str(name_of(type(error)))
    return f"{name}: {text}" if text else name


def summary_without_text(error: BaseException) -> str:
    """Return the name of an error's class, for an error whose text must not be made."""
    return f"{name_of(type(error))}: {NO_TEXT}"


def _has_large_text(error: BaseException) -> bool:
    """Return whether the text is made of arguments so large that it must not be made."""
    return type(error).__str__ is BaseException.__str__ and any(map(_is_large, stored_args(error)))


def _has_large_notes(error: BaseException) -> bool:
    notes = stored_attributes(error).get("__notes__")
    return type(notes) is list and any(map(_is_large, notes))


def _is_large(value: Any) -> bool:
    return type(value) in _SIZED and len(value) > MAX_TEXT


# ---- tracebacks


def user_frames(error: BaseException) -> TracebackType | None:
    """Return an error's traceback without the frames that lead to user code, ours and those of frameworks.

    ``daskserve.errors.full-tracebacks`` keeps those of frameworks.
    """
    found: TracebackType | None = stored_traceback(error)
    frames = []
    each = found
    while each is not None:
        frames.append(each)
        each = each.tb_next
    while frames and _is_in(frames[-1], _CALLS):
        frames.pop()
    names = _OURS if _keeps_frameworks() else (*_OURS, *_FRAMEWORKS)
    kept: TracebackType | None = None
    has_users = False
    for each in reversed(frames):
        is_on_the_way = _is_in(each, names)
        has_users = has_users or not is_on_the_way
        if not (has_users and is_on_the_way):
            kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept if has_users else found


#: The modules through which user code is called, and those through which it calls other deployments.
_OURS = ("daskserve.data.", "daskserve.payload.")
_FRAMEWORKS = ("starlette.", "fastapi.", "anyio.")
_CALLS = ("daskserve.data.caller.",)


def _is_in(frame: TracebackType, names: tuple[str, ...]) -> bool:
    module = frame.tb_frame.f_globals.get("__name__")
    return isinstance(module, str) and module.startswith(names)


def _keeps_frameworks() -> bool:
    # A child process of a worker has not loaded Dask, which takes longer than all of this.
    return "dask.config" in sys.modules and settings.errors().full_tracebacks


def traceback_text(error: BaseException) -> str:
    """Return an error's traceback as Python prints it, from the first frame that is not ours."""
    try:
        if not any(_has_large_text(each) or _has_large_notes(each) for each in chain_of(error)):
            lines = traceback.format_exception(type(error), error, user_frames(error), limit=-MAX_FRAMES)
            text = _joined(error) or "".join(lines)
            # A traceback of another process, which is the cause, begins the text already.
            return encodable(shortened(text.removeprefix(_REMOTE), MAX_TRACEBACK))
    except BaseException:  # of user code; `traceback` reads more attributes than the text
        pass
    return bare_traceback(error, summary_of(error))


def _joined(error: BaseException) -> str:
    """Return one traceback for an error that came from another process and only passes; else nothing.

    The frames here are inserted before those of the other process, each without the line of markers.
    """
    cause, frames = stored_cause(error), user_frames(error)
    if type(cause) is not RemoteTraceback or frames is None:
        return ""
    text = str(*stored_args(cause)).rstrip()
    end = "".join(traceback.format_exception_only(error)).rstrip()
    head, title, inner = text.removesuffix(end).rpartition(_TITLE)
    if not title or not text.endswith(end):
        return ""
    lines = "".join(traceback.format_tb(frames, -MAX_FRAMES)).splitlines(keepends=True)
    outer = "".join(line for line in lines if line.strip(" ^~\n"))
    return f"{head}{title}{outer}{inner}{end}\n"


def bare_traceback(error: BaseException, summary: str) -> str:
    """Return an error's traceback with a ``summary`` in place of its text; runs no code of its class."""
    text = f"{summary}\n"
    frames = user_frames(error)
    if frames is not None:
        text = "".join([_TITLE, *traceback.format_tb(frames, -MAX_FRAMES), text])
    return encodable(shortened(text, MAX_TRACEBACK))


def count_frames(error: BaseException, most: int) -> int:
    """Return how many frames an error's traceback has, or ``most``."""
    frames: TracebackType | None = stored_traceback(error)
    count = 0
    while frames is not None and count < most:
        frames = frames.tb_next
        count += 1
    return count


def chain_of(error: BaseException, most: int = 16) -> Sequence[BaseException]:
    """Return an error, its cause, its context, theirs, and so on; each once."""
    found = [error]
    for each in found:  # which grows meanwhile
        for other in (stored_cause(each), stored_context(each)):
            if other is not None and len(found) < most and not any(other is known for known in found):
                found.append(other)
    return found
