"""A pickler for user code, and the parts of cloudpickle that its documentation does not describe.

cloudpickle stores the functions and classes that no module of the receiver has. Two things in them belong to
this process alone, and would make an application unpicklable that does not use them: the variables of the
function that defines a pydantic model, and the locks of the routers of FastAPI.
"""

from __future__ import annotations

import os.path
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from types import CodeType, FunctionType
from typing import Any

from daskserve.internals.checking import needs
from daskserve.internals.pydantic import NAMESPACE, needed_namespace
from daskserve.internals.python import TracingPickler

with needs("cloudpickle", ">=3.0,<4") as check:
    from cloudpickle import Pickler
    from cloudpickle.cloudpickle import (
        _DYNAMIC_CLASS_TRACKER_BY_CLASS,
        _DYNAMIC_CLASS_TRACKER_BY_ID,
        _DYNAMIC_CLASS_TRACKER_LOCK,
        _class_getstate,
        _code_reduce,
        _dynamic_class_reduce,
    )

    check.attributes(Pickler, "reducer_override")
    # The third item of what they return for a class: its attributes, and its slots.
    check.parameters(_dynamic_class_reduce, "obj")
    check.parameters(_class_getstate, "obj")
    # The second item of what it returns: the arguments of `CodeType`.
    check.parameters(_code_reduce, "obj")

#: Where the name of the file is in the arguments of `CodeType`.
FILE_ARGUMENT = 10
#: The file of code that is in no file, as cloudpickle names it since 3.1.3.
NO_FILE = "<dynamic-code>"
#: The packages whose objects get new locks. Their locks protect caches, and nobody holds one while the
#: application is pickled.
FRAMEWORKS = ("fastapi.", "starlette.")
NEW_LOCKS: Mapping[type[Any], Callable[[], Any]] = {
    type(threading.Lock()): threading.Lock,
    type(threading.RLock()): threading.RLock,
}
#: How much of the way to a value is shown if it does not pass through a function.
SHOWN_STEPS = 3


class NewLock:
    """Is unpickled as a new lock."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        self._factory = factory

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return self._factory, ()


class CodePickler(Pickler):  # type: ignore[misc]
    """Pickles what user code needs, by value where the receiver has no module of it.

    Parameters
    ----------
    substitute : callable, optional
        Returns what to pickle in place of an object, as ``__reduce__`` does, or `NotImplemented`.
    classes : dict, optional
        Gets all classes, with whether they are pickled by value here for the first time in this process.
    """

    def __init__(
        self,
        file: Any,
        *,
        substitute: Callable[[Any], Any] | None = None,
        classes: dict[type, bool] | None = None,
        **how: Any,
    ) -> None:
        super().__init__(file, **how)
        self._substitute = substitute
        self._classes = classes

    def reducer_override(self, value: Any) -> Any:
        """Return how to rebuild a value, or `NotImplemented` for the default."""
        if self._substitute is not None:
            substituted = self._substitute(value)
            if substituted is not NotImplemented:
                return substituted
        if type(value) is CodeType:
            return _with_its_file(value)
        may_be_new = isinstance(value, type) and value not in _DYNAMIC_CLASS_TRACKER_BY_CLASS
        reduced = super().reducer_override(value)
        if isinstance(value, type):
            if self._classes is not None:
                self._classes[value] = may_be_new and value in _DYNAMIC_CLASS_TRACKER_BY_CLASS
            if reduced is not NotImplemented and NAMESPACE in vars(value):
                attributes, _ = reduced[2]
                # cloudpickle leaves out what equals the attribute of a base class, as at the top of a module.
                if attributes.pop(NAMESPACE, None) is not None:
                    attributes |= needed_namespace(value)
        elif reduced is NotImplemented and type(value).__module__.startswith(FRAMEWORKS):
            return _with_new_locks(value)
        return reduced


class SeparatingPickler(CodePickler):
    """Leaves out the values for which ``is_taken`` returns True, and appends each of them to ``values`` once.

    A number stands for each of them in the pickle, which `pickle.Unpickler.persistent_load` receives.
    """

    def __init__(
        self, file: BytesIO, is_taken: Callable[[Any], bool], values: list[Any], **options: Any
    ) -> None:
        super().__init__(file, **options)
        self._is_taken = is_taken
        self._values = values
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        """Return the number of a value that is left out."""
        if not self._is_taken(value):
            return None
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._values)
            self._values.append(value)
        return number


def _with_its_file(code: CodeType) -> Any:
    """Keep the name of the file, which tracebacks show, with the lines where the file can be read.

    cloudpickle has dropped it since 3.1.3, because the cells of a notebook have other names in each process.
    So it is dropped here if there is no such file.
    """
    make, arguments = _code_reduce(code)
    name = code.co_filename if os.path.exists(code.co_filename) else NO_FILE
    return make, (*arguments[:FILE_ARGUMENT], name, *arguments[FILE_ARGUMENT + 1 :])


def _with_new_locks(value: Any) -> Any:
    locks = {k: NEW_LOCKS[type(v)] for k, v in getattr(value, "__dict__", {}).items() if type(v) in NEW_LOCKS}
    if not locks:
        return NotImplemented
    make, arguments, state, *rest = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    return make, arguments, state | {name: NewLock(factory) for name, factory in locks.items()}, *rest


def class_id(cls: type) -> str:
    """Return the id by which processes recognize a class that is pickled by value."""
    return str(_DYNAMIC_CLASS_TRACKER_BY_CLASS[cls])


def set_class_id(cls: type, wanted: str) -> None:
    """Change that id, before another process has seen it; do nothing if another class has the new id."""
    with _DYNAMIC_CLASS_TRACKER_LOCK:
        if wanted not in _DYNAMIC_CLASS_TRACKER_BY_ID:
            _DYNAMIC_CLASS_TRACKER_BY_ID.pop(_DYNAMIC_CLASS_TRACKER_BY_CLASS[cls], None)
            _DYNAMIC_CLASS_TRACKER_BY_CLASS[cls] = wanted
            _DYNAMIC_CLASS_TRACKER_BY_ID[wanted] = cls


# ---- why something cannot be pickled


def find_unpicklable(value: Any, substitute: Callable[[Any], Any] | None = None) -> str:
    """Return in words where the part of a value is that cannot be pickled; empty if that is unknown."""
    pickler = TracingPickler(CodePickler(BytesIO(), protocol=pickle.HIGHEST_PROTOCOL, substitute=substitute))
    try:
        pickler.dump(value)
    except Exception:  # the caller has seen the error, which a foreign object raised
        return ", in ".join(reversed(_steps(pickler.path)))
    return ""


def _steps(path: list[Any]) -> list[str]:
    """Describe the way down a path of values: from the last function on, or the last steps."""
    steps: list[tuple[Any, Any]] = []
    index = 0
    while index < len(path):
        below = {id(each): place for place, each in enumerate(path) if place > index}
        found = ((name, below[id(part)]) for name, part in _parts(path[index]) if id(part) in below)
        name, place = next(found, (None, index + 1))
        if name is not None:
            steps.append((path[index], name))
        index = place
    functions = [place for place, (holder, _) in enumerate(steps) if isinstance(holder, FunctionType)]
    return [_describe(*step) for step in steps[functions[-1] if functions else -SHOWN_STEPS :]]


def _describe(holder: Any, name: Any) -> str:
    if isinstance(holder, FunctionType):
        return f"variable {name!r} of function {holder.__qualname__}"
    if isinstance(holder, dict):
        return f"item {name!r} of a dict"
    if isinstance(holder, type):
        return f"attribute {name!r} of class {holder.__qualname__}"
    return f"attribute {name!r} of a {type(holder).__qualname__}"


def _parts(holder: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the named values that an object refers to."""
    if isinstance(holder, FunctionType):
        code = holder.__code__
        for name, cell in zip(code.co_freevars, holder.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # not assigned yet
                continue
        yield from ((name, holder.__globals__[name]) for name in code.co_names if name in holder.__globals__)
    elif isinstance(holder, dict):
        yield from holder.items()
    else:
        yield from dict(getattr(holder, "__dict__", {})).items()
