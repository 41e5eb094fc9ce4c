"""Errors taken apart and put together again: their form for callers, whatever their classes do."""

from __future__ import annotations

import copyreg
import threading
from collections.abc import Callable
from typing import Any

import msgpack
import pydantic
import pytest
from starlette.exceptions import HTTPException
from tables import case

from daskserve import errors
from daskserve.errors import (
    ActorLostError,
    BackPressureError,
    RemoteTraceback,
    UnavailableError,
    UserCodeError,
)
from daskserve.payload.packed_errors import (
    PackedError,
    dump_error,
    load_error,
    pack_all,
    pack_now,
    pack_without_code,
    received_error,
)
from daskserve.payload.pickling import dump_bytes


class ApiError(Exception):
    """Like errors of many client libraries: pickle does not know its second argument."""

    def __init__(self, message: str, *, response: Any) -> None:
        super().__init__(message)
        self.response = response


class Slotted(Exception):
    __slots__ = ("code",)

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class NotFoundHere(OSError):
    def __init__(self, path: str) -> None:
        super().__init__(2, "no such thing", path)
        self.path = path


class Particular(Exception):
    """Pickles itself."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__("particular")
        self.sum = a + b

    def __reduce__(self) -> Any:
        return Particular, (self.sum, 0)


class Locked(Exception):
    def __init__(self) -> None:
        super().__init__("locked", threading.Lock())
        self.lock = threading.Lock()
        self.code = 7
        self.inner = ApiError("inner", response=[1])


class Group(ExceptionGroup[Exception]):
    """A group of its own class."""


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    """Return an error after user code has raised it."""
    try:
        if cause is None:
            raise error
        raise error from cause
    except BaseException as found:
        return found


def raised_by(function: Callable[..., Any], *args: Any) -> BaseException:
    try:
        function(*args)
    except BaseException as error:
        return error
    raise AssertionError


def crossed(error: BaseException) -> BaseException:
    """Return the error as a caller in another process gets it; packed at once, it is complete."""
    packed = pack_all(error)
    at_once = pack_now(error)
    assert at_once is None or at_once.data == packed.data
    assert f"{packed.summary}{packed.text}".encode(), "these are stored, logged and shown"
    found = received_error(packed.data)
    assert isinstance(found, PackedError)
    return found.load()


def with_attributes(error: Exception, **attributes: Any) -> Exception:
    vars(error).update(attributes)
    return error


def local_error() -> Exception:
    class Local(Exception):
        pass

    return Local("local")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("v", 1, {"a": [None, 2.5]}),
        ValueError(),
        KeyError("k"),
        raised_by(b"\xff".decode),
        raised_by(compile, "x = = 1", "f.py", "exec"),
        raised_by(open, "/does/not/exist"),
        raised_by(__import__, "does_not_exist"),
        raised_by(getattr, None, "nothing"),
        NotFoundHere("/x"),
        ApiError("no answer", response=None),
        Slotted(402),
        Particular(1, 2),
        HTTPException(418, "tea"),
        ExceptionGroup("two", [ValueError("1"), ApiError("2", response=3)]),
        Group("one", [KeyError("1")]),
        local_error(),
        ValueError("\ud800"),
        ValueError("\ud800", "x" * 10_000),
        BackPressureError("full", retry_after_s=7.0),
        with_attributes(BackPressureError("full"), size=2**70, tags={1, 2}, ratio=1j),
        type("Mine", (UnavailableError,), {"__module__": __name__})("of a class of the user's"),
    ],
    ids=repr,
)
def test_an_error_keeps_its_class_its_text_and_its_values(error: BaseException) -> None:
    error.add_note("a note")
    found = crossed(raised(error))
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert repr(found.args) == repr(error.args)
    assert vars(found) == vars(error)
    if isinstance(error, Slotted):
        assert found.code == 402  # type: ignore[attr-defined]


def test_only_unpicklable_parts_of_an_error_are_left_out() -> None:
    found = crossed(raised(Locked()))
    assert type(found) is Locked
    assert found.args[0] == "locked"
    assert "unlocked _thread.lock" in found.args[1]
    assert sorted(vars(found)) == ["code", "inner"]
    assert (found.code, type(found.inner), found.inner.response) == (7, ApiError, [1])


def test_the_cause_and_the_context_are_those_of_the_user_and_the_traceback_comes_first() -> None:
    def fail() -> None:
        try:
            raise ApiError("503", response=threading.Lock())
        except ApiError as error:
            raise ValueError("no rate") from error

    found = crossed(raised_by(fail))
    cause = found.__cause__
    assert (type(found), type(cause), type(found.__context__)) == (ValueError, ApiError, ApiError)
    assert isinstance(cause, ApiError)
    remote = cause.__cause__
    assert isinstance(remote, RemoteTraceback)
    for line in ("in fail", "ApiError: 503", "was the direct cause", "ValueError: no rate"):
        assert line in str(remote)

    try:
        raise KeyError("first")
    except KeyError:
        found = crossed(raised(ValueError("second")))
    assert (type(found.__cause__), type(found.__context__)) == (RemoteTraceback, KeyError)
    # If another replica passes it on, it stays the same, and its traceback continues the earlier one.
    again = crossed(raised(found))
    assert (type(again.__cause__), type(again.__context__)) == (RemoteTraceback, KeyError)
    for each, count in ((found, 1), (again, 2)):
        text = str(each.__cause__)
        assert text.count("Traceback (most recent call last)") == 2  # one is of the context
        assert (text.count("in raised"), text.count("ValueError: second")) == (count, 1)


def test_circles_and_long_chains_end() -> None:
    first, second = ValueError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first
    found = crossed(first)
    assert type(found.__cause__) is KeyError
    assert type(found.__cause__.__cause__) is RemoteTraceback

    own = ValueError("own")
    own.args, own.me, own.__context__ = (own,), own, own  # type: ignore[attr-defined]
    assert type(crossed(own)) is ValueError

    last: BaseException | None = None
    for number in range(1000):
        error = ValueError(number)
        error.__cause__, last = last, error
    assert last is not None
    assert str(crossed(last)) == "999"

    def recurse() -> None:
        recurse()

    assert type(crossed(raised_by(recurse))) is RecursionError


def test_an_error_that_would_end_its_caller_becomes_one_that_does_not() -> None:
    for error, text in [
        (SystemExit(3), "SystemExit: 3"),
        (StopIteration(3), "StopIteration: 3"),
        (GeneratorExit(), "GeneratorExit"),
        (BaseExceptionGroup("g", [KeyboardInterrupt()]), "BaseExceptionGroup: g (1 sub-exception)"),
    ]:
        with case(error, text):
            found = crossed(raised(error))
            assert type(found) is UserCodeError
            assert str(found) == f"User code raised {text}"


def test_the_loss_of_another_replica_is_not_mistaken_for_that_of_this_one() -> None:
    for error in (ActorLostError("x is gone", begun=False), errors.ReplicaBusyError("x is busy")):
        packed = pack_now(raised(error))
        assert packed is not None
        assert isinstance(received_error(packed.data), PackedError)
        found = packed.load()
        assert getattr(found, "begun", True)
        assert errors.http_status_of(found) == error.http_status
        assert str(error) in str(found)
        # An error of daskserve itself has no other parts.
        assert type(received_error(dump_error(error))) is type(error)


# ---- classes with code of their own


class Code(Exception):
    """The base of errors with faulty classes."""


class TextIsNumber(Code):
    def __str__(self) -> str:
        return 402  # type: ignore[return-value]


class TextRaises(Code):
    def __str__(self) -> str:
        raise SystemExit(3)


class Garbage(Code):
    def __reduce__(self) -> Any:
        return 7


class OtherValue(Code):
    def __reduce__(self) -> Any:
        return int, ("5",)


class NeverLoads(Code):
    def __setstate__(self, state: Any) -> None:
        raise TypeError("never")


class Refusing(Code):
    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class Pretending(Code):
    args = property(lambda _: 1 / 0)  # type: ignore[assignment]
    __cause__ = property(lambda _: 1 / 0)  # type: ignore[assignment]
    __notes__ = property(lambda _: 1 / 0)  # type: ignore[assignment]
    __class__ = property(lambda _: 1 / 0)  # type: ignore[assignment]


class NamelessType(type):
    __name__ = property(lambda _: 1 / 0)  # type: ignore[assignment]


class Nameless(Code, metaclass=NamelessType):
    pass


CODE = [TextIsNumber, TextRaises, Garbage, OtherValue, NeverLoads, Refusing, Pretending, Nameless]


def test_an_error_keeps_its_class_whatever_that_does() -> None:
    for cls in CODE:
        with case(cls):
            error = raised(cls("x"))
            assert pack_now(error) is None
            packed = pack_all(error)
            assert type(packed.load()) is cls
            assert "test_packed_errors.py" in packed.text
            assert packed.summary.startswith(type.__dict__["__name__"].__get__(cls))


def test_notes_of_any_kind_do_no_harm() -> None:
    for notes in (42, ["ok", Locked()], "text"):
        error = ValueError("v")
        error.__notes__ = notes  # type: ignore[assignment]
        assert type(crossed(error)) is ValueError


def test_a_traceback_among_the_values_of_an_error_is_left_out() -> None:
    error: Any = raised(ApiError("a", response=None))
    error.where = [error.__traceback__, "kept"]
    assert crossed(error).where == [None, "kept"]  # type: ignore[attr-defined]


RAN: list[str] = []


class Spied(Code):
    """Records each use of its code."""

    def __getattribute__(self, name: str) -> Any:
        RAN.append(name)
        return super().__getattribute__(name)


for hook in (
    "__str__",
    "__repr__",
    "__reduce__",
    "__reduce_ex__",
    "__bool__",
    "__len__",
    "__eq__",
    "__hash__",
):
    setattr(Spied, hook, lambda self, *args, hook=hook: RAN.append(hook) or 1 / 0)


def test_no_code_of_a_class_runs_where_it_must_not() -> None:
    error = raised(Spied("spied"))
    RAN.clear()
    assert pack_now(error) is None
    packed = pack_without_code(error)
    assert RAN == []
    assert packed.summary == "Spied: <its text was not made in time>"
    assert "in raised" in packed.text
    assert type(packed.load()) is Spied


# ---- sizes


class Large:
    def __reduce__(self) -> Any:
        return bytes, (b"x" * 5_000_000,)


def test_a_large_error_is_cut_before_it_is_copied() -> None:
    for value in ["x" * 5_000_000, b"x" * 5_000_000, [1] * 500_000, Large()]:
        with case(value):
            error = ValueError(value, "small")
            error.data, error.code = value, 7  # type: ignore[attr-defined]
            error.add_note("y" * 1_000_000)
            packed = pack_all(raised(error))
            assert len(packed.data) < 2_500_000
            assert len(packed.summary) < 20_000
            assert len(packed.text) < 70_000
            found = packed.load()
            assert (type(found), found.args[1], found.code) == (ValueError, "small", 7)  # type: ignore[attr-defined]
            assert type(found.args[0]) in (type(value), str)


def test_a_large_unicode_error_keeps_most_of_its_text() -> None:
    found = crossed(raised_by((b"a" * 3_000_000 + b"\xff").decode))
    assert type(found) is UnicodeDecodeError
    assert "position 3000000" in str(found)


# ---- the process


def test_reducers_that_others_have_registered_play_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing distributed registers those of tblib for all errors, in its processes only."""

    def refuse(error: BaseException) -> Any:
        raise AssertionError

    for cls in (ValueError, ApiError, Locked):
        monkeypatch.setitem(copyreg.dispatch_table, cls, refuse)
    error = raised(Locked(), cause=ApiError("cause", response=threading.Lock()))
    error.inner = ValueError("v")  # type: ignore[attr-defined]
    found = crossed(error)
    assert (type(found), type(found.__cause__)) == (Locked, ApiError)
    assert repr(found.inner) == "ValueError('v')"  # type: ignore[attr-defined]


def test_an_error_whose_class_the_receiver_does_not_have_is_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pack_all(raised(ApiError("no answer", response=None))).data
    monkeypatch.delattr(f"{__name__}.ApiError")
    found = load_error(data)
    assert (type(found), str(found)) == (UserCodeError, "ApiError: no answer")
    assert isinstance(found.__cause__, RemoteTraceback)


def test_an_error_of_a_library_that_daskserve_uses_arrives_as_it_is() -> None:
    error = raised_by(pydantic.TypeAdapter(int).validate_python, "x")
    found = received_error(dump_error(error))
    assert (type(found), str(found)) == (type(error), str(error))


def test_errors_in_the_stores_of_earlier_versions_are_read() -> None:
    for error, text in ((BackPressureError("full"), ""), (KeyError("k"), "Traceback: k")):
        data = msgpack.packb(("summary", text, dump_bytes(error), None))
        found = load_error(data)
        assert (type(found), found.args) == (type(error), error.args)
        assert isinstance(found.__cause__, RemoteTraceback) is bool(text)
    assert str(load_error(msgpack.packb(("Odd: text", "", None, None)))) == "Odd: text"
