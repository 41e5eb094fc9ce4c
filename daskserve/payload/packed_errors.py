"""Errors of user code as bytes: packed where user code runs, and unpacked in the caller's process.

Between the two, an error is a `PackedError`, so no part of daskserve runs code of the error's class. Errors
of daskserve itself are not packed. This lets a router distinguish the loss of its own replica from a call
that failed inside that replica.

The bytes are msgpack of a summary, the traceback, a mapping, and the ids of the requests for which the error
is logged. The mapping has ``known``: the error as one of daskserve's, if its class is one or is derived from
one; ``parts`` if the error has more than that (`daskserve.payload.error_parts`); ``type``, the name of its
class; and ``of_user`` if user code raised it. In stores of earlier versions, there is a pickle in place of
the mapping.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from daskserve import errors
from daskserve.common.error_types import StandInError, type_name_of
from daskserve.common.formatting import encodable
from daskserve.errors import (
    CALL_FROM,
    REFUSALS,
    ActorLostError,
    RemoteTraceback,
    ReplicaBusyError,
    ServeError,
    UnavailableError,
    UserCodeError,
)
from daskserve.payload.error_parts import (
    LOGGED_FOR,
    Foreign,
    HasCodeError,
    dump_parts,
    has_code_for_pickle,
    has_code_for_text,
    join_error,
    load_parts,
    split_error,
)
from daskserve.payload.error_text import (
    MAX_TRACEBACK,
    bare_traceback,
    causes_of,
    chain_of,
    name_of,
    set_cause,
    shortened,
    stored_args,
    stored_attributes,
    summary_of,
    summary_without_text,
    text_of,
    traceback_text,
)
from daskserve.payload.pickling import load_bytes
from daskserve.payload.shown_errors import cause_of


def note_logged(error: BaseException, *request_ids: str) -> None:
    """Record that a replica has logged an error; the record is sent with the error to other processes."""
    if type(error) is PackedError:
        error.request_ids = request_ids
    else:
        stored_attributes(error)[LOGGED_FOR] = request_ids


def is_logged(error: BaseException, request_id: str | None = None) -> bool:
    """Return whether the replica that raised an error has logged it, for a request or for any."""
    request_ids = error.request_ids if type(error) is PackedError else _logged_for(error)
    if request_ids is None:
        return False
    return request_id is None or request_id in request_ids


def _logged_for(error: BaseException) -> Sequence[str] | None:
    found: Sequence[str] | None = stored_attributes(error).get(LOGGED_FOR)
    return found


class PackedError(StandInError):
    """An error in a form that passes through daskserve and its processes without running code of its class.

    Attributes
    ----------
    summary, text : str
        The name of its class with its text, and its traceback.
    known : ServeError or None
        The error of daskserve that it is, or that its class is derived from.
    request_ids : sequence of str, optional
        See `note_logged`.
    error : BaseException or None
        The error itself, if its text was made, for a log record in the process that packed it.
    kind : type
        Its class there.
    """

    error: BaseException | None = None
    kind: type[BaseException] = Exception
    _loaded: BaseException | None = None

    def __init__(
        self, summary: str, text: str, content: Any, request_ids: Sequence[str] | None = None
    ) -> None:
        super().__init__(summary)
        self.summary = summary
        self.text = text
        self.request_ids = request_ids
        self.known = _known(content)
        self._content = content

    def __repr__(self) -> str:
        return f"<PackedError {self.summary}>"

    @property
    def data(self) -> bytes:
        """The error as bytes, for `received_error` and `load_error`."""
        return dump_parts((self.summary, self._traceback, self._content, self.request_ids))

    @property
    def is_of_user(self) -> bool:
        """Whether user code raised the error."""
        return isinstance(self._content, dict) and "of_user" in self._content

    @property
    def type_name(self) -> str:
        """The name of the error's class, with the module unless it is built in."""
        known = self._content.get("type") if isinstance(self._content, dict) else None
        return known or self.summary.partition(":")[0]

    @property
    def _traceback(self) -> str:
        # The text of an error of daskserve is sufficient, and internals do not help the caller.
        is_known = isinstance(self._content, dict) and "parts" not in self._content
        return "" if is_known else self.text

    def with_text(self, summary: str, text: str = "") -> PackedError:
        """Return a copy with the summary and the text that were left out."""
        content = self._content
        if "parts" in content:
            first, *others = content["parts"]
            content = {**content, "parts": [first._replace(summary=summary), *others]}
        packed = PackedError(summary, text, content, self.request_ids)
        packed.kind = self.kind
        return packed

    def load(self) -> BaseException:
        """Return the error, whose last cause is its remote traceback; this runs code of its class."""
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded

    def _load(self) -> BaseException:
        content = self._content
        error: Any = _known(content)
        if isinstance(content, bytes):
            with suppress(Exception):  # a user's constructor may raise anything
                error = load_bytes(content)
        elif content is not None and "parts" in content:
            error = join_error(content["parts"])
        found: BaseException = error if isinstance(error, BaseException) else UserCodeError(self.summary)
        if self._traceback:
            *_, first = causes_of(found)
            set_cause(first, RemoteTraceback(self._traceback))
        if self.request_ids is not None:
            note_logged(found, *self.request_ids)
        return found


def _known(content: Any) -> ServeError | None:
    if not isinstance(content, dict) or "known" not in content:
        return None
    name, message, fields = content["known"]
    error: ServeError = getattr(errors, name, UserCodeError)(message)
    stored_attributes(error).update(fields)
    return error


# ---- packing


def pack_now(error: BaseException) -> PackedError | None:
    """Pack an error of user code at once; return None if code of its class would have to run."""
    if type(error) is PackedError:
        return error
    try:
        return _packed(error, Foreign.REFUSED)
    except Exception:  # raises `HasCodeError`, or another thread changes the error's values
        return None


def pack_in_steps(error: BaseException) -> Iterator[PackedError]:
    """Yield an error of user code, packed more completely each time; a step may run user code forever."""
    packed = pack_now(error)
    if packed is not None:
        yield packed
        return
    packed = _packed(error, Foreign.BY_VALUE)
    yield packed
    if packed.error is None:
        packed = packed.with_text(summary_of(error))
        yield packed
        packed = packed.with_text(packed.summary, traceback_text(error))
        packed.error = error
        yield packed
    if any(map(has_code_for_pickle, chain_of(error))):
        yield _packed(error, Foreign.RUN, packed.summary, packed.text)


def pack_all(error: BaseException) -> PackedError:
    """Pack an error of user code completely, regardless of the time that this takes."""
    *_, packed = pack_in_steps(error)
    return packed


def pack_without_code(error: BaseException, begun: PackedError | None = None) -> PackedError:
    """Pack an error of user code without running code of its class; its text and values may be missing.

    ``begun`` is the last result of `pack_in_steps`.
    """
    packed = begun or _packed(error, Foreign.LEFT_OUT)
    if packed.error is None:
        packed.text = bare_traceback(error, packed.summary)
    return packed


def packed_here(error: BaseException) -> PackedError:
    """Pack an error that is not packed yet, without running code of its class."""
    if type(error) is PackedError:
        return error
    packed = _packed(error, Foreign.LEFT_OUT, is_of_user=False, untraced=())
    return packed if packed.text else pack_without_code(error, packed)


def dump_error(error: BaseException) -> bytes:
    """Return an error as bytes: an already packed error, or an error of daskserve or its libraries."""
    if type(error) is not PackedError:
        # Errors of daskserve are complete without a traceback.
        summary = summary_of(error)
        error = _packed(error, Foreign.RUN, summary, is_of_user=False, untraced=(ServeError,))
    return error.data


def received_error(data: bytes) -> BaseException:
    """Return the error that another process has sent: packed if user code raised it."""
    packed = _unpacked(data)
    return packed if packed.is_of_user else packed.load()


def load_error(data: bytes) -> BaseException:
    """Return the error that `dump_error` packed, caused by its remote traceback.

    An error whose class does not exist here becomes a `UserCodeError`.
    """
    return _unpacked(data).load()


def unpacked(error: BaseException) -> BaseException:
    """Return an error for user code, without frames of daskserve; may run code of its class."""
    if type(error) is PackedError:
        return error.load()
    if isinstance(error, ServeError):
        error.__context__ = error.__traceback__ = None
        error.__cause__ = cause_of(error)
    return error


def known_of(error: BaseException) -> BaseException:
    """Return an error as one of daskserve, if it is one; runs no code of its class."""
    return (error.known or error) if type(error) is PackedError else error


def raisable(error: BaseException) -> Exception:
    """Return the error, or a `UserCodeError` if raising the error would end more than its call."""
    if is_raisable(error):
        return error  # type: ignore[return-value]
    stand_in = UserCodeError(f"User code raised {summary_of(error)}")
    stand_in.__cause__ = error
    return stand_in


def is_raisable(error: BaseException) -> bool:
    """Return whether raising an error ends only its call."""
    kind = type(error)  # `isinstance` may run code of the error's class
    return issubclass(kind, Exception) and not issubclass(kind, (StopIteration, StopAsyncIteration))


def _unpacked(data: bytes) -> PackedError:
    return PackedError(*load_parts(data))


def _packed(
    error: BaseException,
    foreign: Foreign,
    summary: str = "",
    text: str = "",
    *,
    is_of_user: bool = True,
    untraced: tuple[type[BaseException], ...] = REFUSALS,
) -> PackedError:
    chain = chain_of(error)
    is_bare = not summary and any(map(has_code_for_text, chain))
    if foreign is Foreign.REFUSED and (is_bare or any(map(has_code_for_pickle, chain))):
        raise HasCodeError
    if not summary:
        summary = summary_without_text(error) if has_code_for_text(error) else summary_of(error)
    sent = _as_raised_by_user(error, summary) if is_of_user else error
    content: dict[str, Any] = {"of_user": True} if is_of_user else {}
    content["type"] = type_name_of(type(sent))
    known, is_whole = _known_parts(sent)
    if known is not None:
        content["known"] = known
    if not is_whole:
        content["parts"] = split_error(sent, foreign, summary)
    if not text and not is_bare and not issubclass(type(sent), untraced):
        text = traceback_text(error)
    packed = PackedError(summary, text, content, _logged_for(error))
    packed.kind = type(sent)
    packed.error = None if is_bare else error
    return packed


def _as_raised_by_user(error: BaseException, summary: str) -> BaseException:
    """Return the error to send; an error that would mislead the caller's router is replaced."""
    if not is_raisable(error):
        return UserCodeError(f"User code raised {summary}")
    # Unchanged, these two errors would mean that this replica has not begun the request.
    if type(error) is ReplicaBusyError:
        return UnavailableError(_of_call(error))
    if type(error) is ActorLostError:
        return ActorLostError(_of_call(error))
    return error


def _of_call(error: ServeError) -> str:
    text = str(error)
    return text if text.startswith(CALL_FROM) else f"A call made by this replica failed: {text}"


def _known_parts(error: BaseException) -> tuple[tuple[str, str, dict[str, Any]] | None, bool]:
    """Return the name, message and fields of an error of daskserve, and whether it has no other content.

    For other errors, return None and False.
    """
    if not issubclass(type(error), ServeError):
        return None, False
    cls = next(each for each in type(error).__mro__ if vars(errors).get(name_of(each)) is each)
    args, attributes = stored_args(error), stored_attributes(error)
    message = args[0] if args and type(args[0]) is str else "" if has_code_for_text(error) else text_of(error)
    names = (attributes if cls is type(error) else vars(cls())).keys() - {LOGGED_FOR}
    fields = {name: attributes[name] for name in sorted(names) if _is_field(name, attributes.get(name, ...))}
    is_whole = cls is type(error) and len(fields) == len(names) and len(args) <= 1
    return (name_of(cls), encodable(shortened(message, MAX_TRACEBACK)), fields), is_whole


def _is_field(name: Any, value: Any) -> bool:
    """Return whether msgpack can store an attribute unchanged."""
    if type(name) is not str or (type(value) is int and value.bit_length() > 63):
        return False
    return type(value) in (str, float, bool, int, type(None))
