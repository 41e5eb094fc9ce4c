"""The text of an error of any class: bounded, encodable, and available even if ``__str__`` fails."""

from __future__ import annotations

import reprlib
import sys
import traceback
from collections.abc import Iterator, Sequence
from itertools import islice
from types import TracebackType
from typing import Any

from daskserve.common import settings
from daskserve.common.formatting import encodable
from daskserve.errors import RemoteTraceback

#: Maximum length of the text of one error, and of a traceback.
MAX_TEXT = 8 * 1024
MAX_TRACEBACK = 64 * 1024
#: Maximum length of one value in the text of an error that has large arguments.
MAX_VALUE = 200
#: Maximum number of frames of a traceback; in a deep recursion, the innermost frames are kept.
MAX_FRAMES = 500

#: Replaces the text of an error if code of its class must not run, or takes too long.
NO_TEXT = "<its text was not made in time>"

#: The beginning of an error's text if its cause is a traceback of another process.
_REMOTE = f"{RemoteTraceback.__module__}.{RemoteTraceback.__qualname__}: \n"

#: The first line of a traceback.
_TITLE = "Traceback (most recent call last):\n"

_SIZED = frozenset((str, bytes, bytearray, list, tuple, dict, set, frozenset))

# Read the values that Python itself stores for a class and an error, even if the class overrides these names.
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
    """Return a string without its middle if it is longer than ``most``."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} ... ({len(text)} characters) ... {text[-half:]}"


def brief(value: Any) -> str:
    """Return a short ``repr`` of a value; a large built-in value is truncated before it is formatted."""
    if type(value) in (str, bytes, bytearray):
        more = f" ... ({len(value)} in all)" if len(value) > MAX_VALUE else ""
        return f"{value[:MAX_VALUE]!r}{more}"
    found = reprlib.Repr()
    found.maxother = MAX_VALUE
    return found.repr(value)


def text_of(error: BaseException) -> str:
    """Return the text of an error, or a note if its class fails to produce one."""
    try:
        if _has_large_text(error):
            args = stored_args(error)
            is_text = type(args[0]) is str
            return encodable(shortened(args[0], MAX_TEXT) if is_text else f"({', '.join(map(brief, args))})")
        # A subclass of `str` may have any methods.
        return encodable(shortened(str.__str__(str(error)), MAX_TEXT))
    except BaseException as failure:  # user code may raise anything here
        return f"<its text cannot be made: {name_of(type(failure))}>"


def summary_of(error: BaseException) -> str:
    """Return the name of an error's class and its text."""
    text = text_of(error)
    name = str(name_of(type(error)))
    return f"{name}: {text}" if text else name


def summary_without_text(error: BaseException) -> str:
    """Return the name of an error's class, for an error whose text must not be computed."""
    return f"{name_of(type(error))}: {NO_TEXT}"


def _has_large_text(error: BaseException) -> bool:
    """Return whether an error's text would be formatted from large arguments, which takes too long."""
    return type(error).__str__ is BaseException.__str__ and any(map(_is_large, stored_args(error)))


def _has_large_notes(error: BaseException) -> bool:
    notes = stored_attributes(error).get("__notes__")
    return type(notes) is list and any(map(_is_large, notes))


def _is_large(value: Any) -> bool:
    return type(value) in _SIZED and len(value) > MAX_TEXT


# ---- tracebacks


def user_frames(error: BaseException) -> TracebackType | None:
    """Return an error's traceback without the frames of daskserve and frameworks that lead to user code.

    ``daskserve.errors.full-tracebacks`` keeps the frames of frameworks.
    """
    found: TracebackType | None = stored_traceback(error)
    frames = list(frames_of(found))
    while frames and _is_in(frames[-1], _CALLS):
        frames.pop()
    names = _OURS if _keeps_frameworks() else (*_OURS, *_FRAMEWORKS)
    users = [number for number, each in enumerate(frames) if not _is_in(each, names)]
    if not users:
        return found
    return traceback_of([*(frames[number] for number in users), *frames[users[-1] + 1 :]])


def frames_of(traceback: TracebackType | None) -> Iterator[TracebackType]:
    """Yield the entries of a traceback, the outermost first."""
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def traceback_of(frames: Sequence[TracebackType]) -> TracebackType | None:
    """Return a traceback of these entries."""
    found: TracebackType | None = None
    for each in reversed(frames):
        found = TracebackType(found, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return found


#: The modules that call user code, and those through which user code calls other deployments.
_OURS = ("daskserve.data.", "daskserve.payload.")
_FRAMEWORKS = ("starlette.", "fastapi.", "anyio.")
_CALLS = ("daskserve.data.caller.",)


def _is_in(frame: TracebackType, names: tuple[str, ...]) -> bool:
    module = frame.tb_frame.f_globals.get("__name__")
    return isinstance(module, str) and module.startswith(names)


def _keeps_frameworks() -> bool:
    # A worker's child process has not loaded Dask, and loading it takes longer than formatting the error.
    return "dask.config" in sys.modules and settings.errors().full_tracebacks


def traceback_text(error: BaseException) -> str:
    """Return an error's traceback as Python prints it, from the first frame outside of daskserve."""
    try:
        if not any(_has_large_text(each) or _has_large_notes(each) for each in chain_of(error)):
            lines = traceback.format_exception(type(error), error, user_frames(error), limit=-MAX_FRAMES)
            text = _joined(error) or "".join(lines)
            # If the cause is a traceback of another process, the text already begins with it.
            return encodable(shortened(text.removeprefix(_REMOTE), MAX_TRACEBACK))
    except BaseException:  # user code may raise any error; `traceback` reads more attributes than the text
        pass
    return bare_traceback(error, summary_of(error))


def _joined(error: BaseException) -> str:
    """Return one traceback for an error that was raised in another process; empty for other errors.

    The frames of this process come before those of the other process, without marker lines.
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
    """Return the number of frames of an error's traceback, at most ``most``."""
    return sum(1 for _ in islice(frames_of(stored_traceback(error)), most))


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the chain of its causes, each once."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and not any(cause is each for each in seen):
        seen.append(cause)
        yield cause
        cause = stored_cause(cause)


def chain_of(error: BaseException, most: int = 16) -> Sequence[BaseException]:
    """Return an error, its cause and context, their causes and contexts, and so on, each once."""
    found = [error]
    for each in found:  # the list grows during the loop
        for other in (stored_cause(each), stored_context(each)):
            if other is not None and len(found) < most and not any(other is known for known in found):
                found.append(other)
    return found
