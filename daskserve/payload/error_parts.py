"""Errors taken apart for other processes, and rebuilt without running their constructors.

Problem: pickle calls an error's class with ``args``, which many classes do not accept, and fails for the
whole error if one attribute cannot be pickled. Other content depends on the process: distributed registers
reducers (of tblib) that add the cause, the context and the traceback. Choice: an error is its class,
``args``, the fields of its built-in class, its attributes, its cause and its context. Each value whose class
defines pickling is sent as a separate pickle. A value that cannot be pickled is left out, or replaced by a
string among ``args``. The receiver creates the error with the built-in class from which it is derived. If the
error's own class has methods for pickling, they are used as long as they work.

So an error keeps its class unless the class itself cannot be pickled, or does not exist at the receiver.
"""

from __future__ import annotations

import io
import pickle
from abc import ABCMeta
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import Enum
from types import MemberDescriptorType, TracebackType
from typing import Any, NamedTuple

import msgpack

from daskserve.errors import RemoteTraceback, ServeError, UserCodeError
from daskserve.payload.error_text import (
    MAX_TEXT,
    brief,
    chain_of,
    count_frames,
    is_context_suppressed,
    name_of,
    set_cause,
    set_context,
    set_context_suppressed,
    shortened,
    stored_args,
    stored_attributes,
    stored_cause,
    stored_context,
    summary_of,
    summary_without_text,
)
from daskserve.payload.pickling import load_bytes

#: Maximum size of a value that is sent without its own pickle, and of all pickles of an error.
MAX_PLAIN_BYTES = 16 * 1024
MAX_PICKLED_BYTES = 1024 * 1024
#: Maximum nesting of values that are sent without their own pickle, and of errors among values.
MAX_DEPTH = 4
#: An error with more frames is not packed where user code runs.
MAX_FRAMES_AT_ONCE = 100

#: The attribute of an error that holds the ids of the requests for which a replica has logged it.
LOGGED_FOR = "_daskserve_logged_for"
#: The type flag of classes that are not built in.
_IS_HEAP_TYPE = 1 << 9
#: Methods of a class that run when its errors are formatted or read.
_FORMATTING = frozenset(
    (
        *("__str__", "__getattribute__", "__getattr__", "__class__", "__notes__"),
        *("__bool__", "__len__", "__cause__", "__context__", "__suppress_context__", "__traceback__"),
    )
)
#: Methods of a class that run when its errors are pickled or unpickled.
_PICKLING = frozenset(("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__"))
#: Methods that run when `traceback` looks for the attribute that an `AttributeError` misses.
_LOOKUP_HOOKS = frozenset(("__dir__", "__getattribute__", "__getattr__", "__class__"))
_SCALARS = frozenset((float, complex, bool, type(None)))
_CONTAINERS = frozenset((tuple, list, set, frozenset))
#: Fields that are not sent: ``obj`` of an `AttributeError` may be any object of user code.
_UNSENT_FIELDS = frozenset(("obj",))


class Foreign(Enum):
    """What to do with an error's values and class if pickling them would run code."""

    #: `HasCodeError` is raised.
    REFUSED = 0
    #: The values are left out; a class is kept if the receiver can import it.
    LEFT_OUT = 1
    #: The values are left out; the class is pickled by value if necessary.
    BY_VALUE = 2
    #: Their code is run.
    RUN = 3


class HasCodeError(Exception):
    """An error cannot be taken apart without running code of its class or of its values."""


class _TooLargeError(Exception):
    """A pickle has become too large."""


class Part(NamedTuple):
    """One error of a chain, in the form in which it is sent.

    Attributes
    ----------
    state : bytes or None
        The pickled class, ``args``, fields and attributes, without the values among ``items``.
    items : mapping
        The pickles of values, by their names: ``a0`` among ``args``, ``f`` a field and ``d`` an attribute.
    reduced : bytes or None
        The pickle that the class's own methods have made.
    cause, context : int
        Their positions in the chain, or -1.
    """

    summary: str
    state: bytes | None
    items: Mapping[str, bytes]
    reduced: bytes | None
    is_suppressed: bool
    cause: int
    context: int


def split_error(error: BaseException, foreign: Foreign, summary: str = "", *, depth: int = 0) -> list[Part]:
    """Return an error and its chain in parts. A given ``summary`` is not computed again.

    Raises
    ------
    HasCodeError
        ``foreign`` is REFUSED, and code would have to run.
    """
    chain = [each for each in chain_of(error) if type(each) is not RemoteTraceback]
    dumps = _Dumps(foreign, depth)
    numbers = {id(each): number for number, each in enumerate(chain)}
    return [
        dumps.part(
            each,
            summary if each is error and summary else _summary(each, foreign),
            numbers.get(id(stored_cause(each)), -1),
            numbers.get(id(stored_context(each)), -1),
        )
        for each in chain
    ]


def _summary(error: BaseException, foreign: Foreign) -> str:
    if foreign is not Foreign.RUN and has_code_for_text(error):
        return summary_without_text(error)
    return summary_of(error)


def has_code_for_pickle(error: BaseException) -> bool:
    """Return whether pickling an error may run code of its class or of its values, or take long."""
    return type(error) is not RemoteTraceback and (
        class_has_code(type(error), _PICKLING)
        or not (is_plain(stored_args(error)) and is_plain(stored_attributes(error)))
    )


def has_code_for_text(error: BaseException) -> bool:
    """Return whether formatting an error may run code of its class or of its values, or take long."""
    return type(error) is not RemoteTraceback and (
        class_has_code(type(error), _FORMATTING)
        or count_frames(error, MAX_FRAMES_AT_ONCE) == MAX_FRAMES_AT_ONCE
        or not is_plain(stored_args(error))
        or (isinstance(error, AttributeError) and _has_lookup_code(error.obj))
    )


def class_has_code(cls: type[Any], hooks: frozenset[str]) -> bool:
    """Return whether a class, or a base of it that is not built in, defines one of some attributes."""
    return type(cls) not in (type, ABCMeta) or any(
        each.__flags__ & _IS_HEAP_TYPE and each is not ServeError and not hooks.isdisjoint(vars(each))
        for each in cls.__mro__
    )


def _has_lookup_code(value: Any) -> bool:
    kind = type(value)
    return class_has_code(value if issubclass(kind, type) else kind, _LOOKUP_HOOKS)


def is_plain(value: Any) -> bool:
    """Return whether a value is small, and all of it is of built-in types."""
    return _size_of(value, MAX_PLAIN_BYTES) <= MAX_PLAIN_BYTES


def _size_of(value: Any, most: int, depth: int = 0) -> int:
    """Return the approximate size of a value as text; more than ``most`` if its class is not built in."""
    kind = type(value)
    if kind is str:
        return len(value)
    if kind in _SCALARS:
        return 8
    if kind is int:
        return value.bit_length() // 3  # type: ignore[no-any-return]
    if kind is bytes:
        return 4 * len(value)
    if (kind in _CONTAINERS or kind is dict) and depth < MAX_DEPTH:
        size = 8 * len(value)
        if size <= most:
            for each in [*value, *value.values()] if kind is dict else value:
                size += 8 + _size_of(each, most - size, depth + 1)
                if size > most:
                    break
        return size
    return most + 1


# ---- values


class _Dumps:
    """Pickles the values of one chain, within its size."""

    def __init__(self, foreign: Foreign, depth: int) -> None:
        self._foreign = foreign
        self._depth = depth
        self._left_bytes = MAX_PICKLED_BYTES

    def part(self, error: BaseException, summary: str, cause: int, context: int) -> Part:
        items: dict[str, bytes] = {}
        args = [self._value(f"a{n}", each, items) for n, each in enumerate(stored_args(error))]
        fields = self._values("f", _fields_of(error), items)
        attributes = self._values("d", stored_attributes(error), items)
        state = self._state((type(error), tuple(args), fields, attributes))
        reduced = None
        if self._foreign is Foreign.RUN and class_has_code(type(error), _PICKLING):
            reduced = self._dump(error, error)
        return Part(summary, state, items, reduced, bool(is_context_suppressed(error)), cause, context)

    def _values(self, prefix: str, values: Mapping[str, Any], items: dict[str, bytes]) -> dict[str, Any]:
        found = {}
        for name, value in list(values.items()):
            if name == LOGGED_FOR:
                continue
            if is_plain(value):
                found[name] = value
            elif self._foreign is Foreign.RUN and type(name) is str:
                data = self._dump(value)
                if data is not None:
                    items[prefix + name] = data
        return found

    def _value(self, name: str, value: Any, items: dict[str, bytes]) -> Any:
        """Return an argument if it is plain; otherwise keep its pickle, or return a substitute."""
        if is_plain(value):
            return value
        if self._foreign is Foreign.RUN:
            data = self._dump(value)
            if data is not None:
                items[name] = data
                return None
        return _stand_in(value, self._foreign)

    def _state(self, state: tuple[Any, ...]) -> bytes | None:
        # Pickled by reference if the receiver can import the class, because this takes a tenth of the time.
        try:
            data = pickle.dumps(state, 5)
            if data.find(b"__main__") < 0:
                return data
        except Exception:  # the error depends on the class
            pass
        if self._foreign is Foreign.REFUSED:
            raise HasCodeError
        return None if self._foreign is Foreign.LEFT_OUT else self._dump(state)

    def _dump(self, value: Any, own: BaseException | None = None) -> bytes | None:
        """Return a pickle; None if it is impossible or too large. ``own`` is pickled by its own methods."""
        if type(value) in (str, bytes, bytearray) and len(value) > self._left_bytes:
            return None  # a pickler would first copy the value
        file = _Bounded(self._left_bytes)

        def is_small(buffer: pickle.PickleBuffer) -> bool:
            file.check(buffer.raw().nbytes)
            return True

        def substitute(found: Any) -> Any:
            return self._reduced(found, own)

        # imported on use, as in `daskserve.payload.pickling`
        from daskserve.internals.cloudpickle import CodePickler

        try:
            CodePickler(file, substitute=substitute, protocol=5, buffer_callback=is_small).dump(value)
        except BaseException:  # user code may raise anything here, such as SystemExit
            return None
        data = file.getvalue()
        self._left_bytes -= len(data)
        return data

    def _reduced(self, value: Any, own: BaseException | None) -> Any:
        """Return the reduction of errors among the values, which this module pickles."""
        if value is own and own is not None:
            return value.__reduce_ex__(5)
        if issubclass(type(value), BaseException):
            if self._depth >= MAX_DEPTH:
                return UserCodeError, (summary_of(value),)
            return _put_together_nested, (
                dump_parts(split_error(value, self._foreign, depth=self._depth + 1)),
            )
        if type(value) is TracebackType:
            return _nothing, ()
        return NotImplemented


def _stand_in(value: Any, foreign: Foreign) -> Any:
    """Return a substitute for an argument that cannot be pickled."""
    if type(value) is str:
        return shortened(value, MAX_TEXT)
    if type(value) is bytes:
        return value[:MAX_TEXT]  # the constructor of a `UnicodeDecodeError` takes no text
    if foreign is Foreign.RUN:
        with suppress(Exception):  # the value's __repr__ may raise anything
            return brief(value)
    return f"<{name_of(type(value))}>"


class _Bounded(io.BytesIO):
    """A file in memory with a maximum size."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def check(self, size_bytes: int) -> None:
        if self.tell() + size_bytes > self._most:
            raise _TooLargeError

    def write(self, data: Any, /) -> int:
        self.check(memoryview(data).nbytes)
        return super().write(data)


def _fields_of(error: BaseException) -> dict[str, Any]:
    """Return the values that built-in classes and ``__slots__`` store beyond ``args`` and attributes."""
    found = {}
    for cls in type(error).__mro__:
        if cls is BaseException or cls is object:
            break
        for name, each in vars(cls).items():
            if type(each) is MemberDescriptorType and name not in _UNSENT_FIELDS:
                with suppress(AttributeError):  # a slot may be empty
                    value = each.__get__(error)
                    if value is not None:
                        found[name] = value
    return found


def _nothing() -> None:
    """Return None, in place of a value that is not sent."""


# ---- unpacking


def dump_parts(parts: Sequence[Any]) -> bytes:
    """Return the parts of an error as bytes."""
    return bytes(msgpack.packb(parts, unicode_errors="surrogatepass"))


def load_parts(data: bytes) -> list[Any]:
    """Return the result of `dump_parts` as plain values."""
    found: list[Any] = msgpack.unpackb(data, unicode_errors="surrogatepass")
    return found


def _put_together_nested(data: bytes) -> BaseException:  # pickles name it
    return join_error(load_parts(data))


def join_error(parts: Sequence[Sequence[Any]]) -> BaseException:
    """Return an error with its chain from its parts.

    An error whose class does not exist here is a `UserCodeError`.
    """
    found = [Part(*each) for each in parts]
    made = [(each, _made(each)) for each in found]
    errors = [UserCodeError(part.summary) if error is None else error for part, error in made]
    for error, part in zip(errors, found, strict=True):
        if part.cause >= 0:
            set_cause(error, errors[part.cause])
        if part.context >= 0:
            set_context(error, errors[part.context])
        set_context_suppressed(error, part.is_suppressed)
    return errors[0]


def _made(part: Part) -> BaseException | None:
    error = _loaded(part.reduced)
    state = _loaded(part.state)
    if isinstance(error, BaseException):
        if state is not None and "__notes__" in state[3]:
            stored_attributes(error).setdefault("__notes__", state[3]["__notes__"])
        return error
    if state is None:
        return None
    cls, args, fields, attributes = state
    names = {name: _loaded(data) for name, data in part.items.items()}
    args = tuple([names.get(f"a{number}", each) for number, each in enumerate(args)])
    for name, value in names.items():
        if value is not None and name[0] != "a":
            (fields if name[0] == "f" else attributes)[name[1:]] = value
    try:
        return _new(cls, args, fields, attributes)
    except Exception:  # a class of an extension module may need its own constructor
        return None


def _loaded(data: bytes | None) -> Any:
    if data is None:
        return None
    try:
        return load_bytes(data)
    except (Exception, SystemExit):  # user code may raise anything here
        return None


def _new(
    cls: type[BaseException], args: tuple[Any, ...], fields: dict[str, Any], attributes: dict[str, Any]
) -> BaseException:
    base: Any = next(each for each in cls.__mro__ if not each.__flags__ & _IS_HEAP_TYPE)
    error: BaseException = base.__new__(cls, *args)
    try:
        base.__init__(error, *args)
    except Exception:  # the arguments belong to a derived class
        BaseException.__init__(error, *args)
    for name, value in fields.items():
        with suppress(Exception):  # the class may have changed; groups have fields that cannot be set
            _member(cls, name).__set__(error, value)
    stored_attributes(error).update(attributes)
    return error


def _member(cls: type[Any], name: str) -> Any:
    return next(
        vars(each)[name] for each in cls.__mro__ if type(vars(each).get(name)) is MemberDescriptorType
    )
