"""Explains why a value cannot be pickled: the object, the path to it, and the remedy."""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any, NamedTuple, TypeAlias

from daskserve.errors import UnpicklableError
from daskserve.payload.error_text import text_of
from daskserve.payload.pickling import Substitute, dump_bytes

#: The values that a caller knows by name: the deployed code and its arguments.
NamedParts: TypeAlias = Sequence[tuple[str, Any]]
#: Number of steps that are shown at the start and at the end of a long path.
FIRST_STEPS = 2
LAST_STEPS = 8

OPEN_THERE = (
    "Open it where it is used: in the __init__ of the class that is deployed, or in the lifespan of the ASGI "
    "application."
)
START_THERE = (
    "Start it where it runs: in the __init__ of the class that is deployed, or in the lifespan of the ASGI "
    "application."
)
MAKE_THERE = (
    "Processes cannot share it. Create it in the __init__ of the class that uses it, or as a global variable."
)
#: The names by which users know some types.
TYPE_NAMES: Mapping[str, str] = {
    "_thread.lock": "threading.Lock",
    "_thread.RLock": "threading.RLock",
    "_thread._local": "threading.local",
    "_queue.SimpleQueue": "queue.SimpleQueue",
    "socket.socket": "socket",
}
#: The remedy for objects of a type, by its name, or of all types of a module.
REMEDIES: Mapping[str, str] = {
    "threading.Lock": MAKE_THERE,
    "threading.RLock": MAKE_THERE,
    "threading.local": MAKE_THERE,
    "threading.Thread": START_THERE,
    "threading.Timer": START_THERE,
    "threading": MAKE_THERE,
    "queue": MAKE_THERE,
    "multiprocessing": MAKE_THERE,
    "asyncio": START_THERE,
    "_asyncio": START_THERE,
    "concurrent": START_THERE,
    "subprocess": START_THERE,
    "coroutine": "Await it, and pass its result.",
    "generator": "Pass a list of its items, or the function that makes it.",
    "async_generator": "Pass a list of its items, or the function that makes it.",
    "weakref": "Refer to the object itself.",
    "_io": OPEN_THERE,
    "socket": OPEN_THERE,
    "ssl": OPEN_THERE,
    "sqlite3": OPEN_THERE,
    "mmap": OPEN_THERE,
}
#: The types that user code consists of, by the roots of their modules.
CODE = frozenset({"builtins", "__main__", "functools", "fastapi", "starlette", "typing", "collections"})


class PathStep(NamedTuple):
    """A step of the path to an object that cannot be pickled: its text, and the object at its end."""

    text: str
    value: Any

    @property
    def type_name(self) -> str:
        """The name of the object's type."""
        kind = type(self.value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        return TYPE_NAMES.get(name, name.removeprefix("builtins.").removeprefix("__main__."))

    @property
    def is_of_library(self) -> bool:
        """Whether the object's class belongs to an installed library."""
        root = _root_of(type(self.value))
        file = getattr(sys.modules.get(root), "__file__", None) or ""
        is_installed = "-packages" in file or root in sys.stdlib_module_names
        return is_installed and root not in CODE and not isinstance(self.value, type)

    @property
    def remedy(self) -> str:
        """The remedy for objects of this type; empty if none is known."""
        known = (self.type_name, _root_of(type(self.value)))
        return next((REMEDIES[name] for name in known if name in REMEDIES), "")


def _root_of(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


def unpicklable_error(
    subject: str,
    error: Exception,
    value: Any,
    roots: NamedParts,
    remedy: str,
    substitution: Callable[[], Substitute] | None = None,
) -> UnpicklableError:
    """Return the error that says which part of a value cannot be pickled, and what to do.

    Parameters
    ----------
    subject
        The value in words, as the beginning of a sentence.
    error
        The pickler's error.
    roots
        The named parts of the value.
    remedy
        The remedy for objects of all types that are not in `REMEDIES`.
    """
    steps, advice = _to_culprit(path_to(value, roots, substitution))
    problem = text_of(error).rstrip(".")
    if not isinstance(error, pickle.PicklingError):
        problem = f"{type(error).__name__}: {problem}"
    if steps:
        problem = f"{shown(steps)} is of type {steps[-1].type_name} ({problem})"
    advice = getattr(error, "remedy", "") or advice or remedy
    return UnpicklableError(f"{subject} cannot be pickled: {problem}. {advice}")


def dump_option(name: str, value: Any, remedy: str) -> bytes:
    """Pickle the value of an option.

    Raises
    ------
    UnpicklableError
        It cannot be pickled; the message ends with the remedy, unless there is a better one.
    """
    try:
        return dump_bytes(value)
    except Exception as error:  # a foreign object may raise anything when it is pickled
        raise unpicklable_error(f"The option {name}", error, value, [(name, value)], remedy) from error


def path_to(
    value: Any, roots: NamedParts, substitution: Callable[[], Substitute] | None = None
) -> list[PathStep]:
    """Return the path to the part of a value that cannot be pickled; empty if the part is not known.

    The first step is the root where the path begins.
    """
    from daskserve.internals.cloudpickle import trace  # imported on use, as in `daskserve.payload.pickling`

    _, path = trace(value, substitution)
    names = {id(each): name for name, each in roots}
    start = next((place for place, each in enumerate(path) if id(each) in names), 0)
    if not path:
        return []
    name = names.get(id(path[start]), "")
    landmarks = {id(each): text for text, each in _landmarks(path[start])}
    last = max((place for place, each in enumerate(path) if id(each) in landmarks), default=start)
    return _steps(name + landmarks.get(id(path[last]), ""), path[last:])


def _landmarks(root: Any, depth: int = 5) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a class or application that a user knows by name: its methods and routes."""
    if isinstance(root, type):
        functions = ((name, _unwrapped(each)) for name, each in vars(root).items())
        yield from ((f".{name}", each) for name, each in functions if isinstance(each, FunctionType))
    if depth and any(_root_of(each) == "starlette" for each in type(root).__mro__):
        for number, route in enumerate(getattr(root, "routes", None) or ()):
            yield f".routes[{number}]", route
            inner = "original_router" if hasattr(route, "original_router") else "app"
            for text, each in _landmarks(getattr(route, inner, None), depth - 1):
                yield f".routes[{number}].{inner}{text}", each


def arguments_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> NamedParts:
    """Return the arguments of a call, each with its name for an error."""
    named = [(f"argument {name!r}", each) for name, each in kwargs.items()]
    return [*((f"argument {number}", each) for number, each in enumerate(args, 1)), *named]


def variable_of(value: Any, default: str) -> str:
    """Return the name of the program's variable that has a value."""
    program = vars(sys.modules["__main__"]).copy().items()
    return next((name for name, each in program if each is value), default)


def shown(steps: Sequence[PathStep]) -> str:
    """Return a path as a string."""
    texts = [each.text for each in steps]
    if len(texts) > FIRST_STEPS + LAST_STEPS:
        texts[FIRST_STEPS:-LAST_STEPS] = [" ... "]
    return "".join(texts).replace(".router.routes[", ".routes[").removeprefix(" -> ").removeprefix(".")


def _to_culprit(steps: list[PathStep]) -> tuple[list[PathStep], str]:
    """Return the path to the object that the user knows, and the remedy for it; empty if there is none.

    This is the first object with a remedy, or the first one whose class belongs to a library, because users
    do not know the parts of a library's object.
    """
    for number, step in enumerate(steps, 1):
        is_inside = number < len(steps) and steps[number].text.startswith(".")
        if step.remedy or (is_inside and step.is_of_library):
            # The class of the object that holds the lock already creates the lock.
            has_holder = step.text.startswith(".") and step.remedy is MAKE_THERE
            return steps[:number], "" if has_holder else step.remedy
    return steps, ""


def _steps(name: str, path: Sequence[Any]) -> list[PathStep]:
    """Return the steps from the first to the last value of a path."""
    steps = [PathStep(name, path[0])]
    index = 0
    while index < len(path) - 1:
        below = {id(each): place for place, each in enumerate(path) if place > index}
        found = [(below[id(part)], text) for text, part in _parts(path[index]) if id(part) in below]
        index, text = min(found, default=(index + 1, ""))
        if text:
            value = path[index]
            is_told = not isinstance(value, FunctionType) or value.__name__ in text
            steps.append(PathStep(text if is_told else f"{text} ({value.__name__})", value))
    return steps


def _parts(holder: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values that an object refers to, each with the step to it."""
    if isinstance(holder, FunctionType):
        yield from _parts_of_function(holder)
    elif isinstance(holder, type):
        yield from ((f".{name}", _unwrapped(each)) for name, each in vars(holder).items())
        yield from ((f" -> base class {each.__qualname__}", each) for each in holder.__bases__)
    elif isinstance(holder, MethodType):
        yield from ((f".{name}", getattr(holder, name)) for name in ("__self__", "__func__"))
    elif isinstance(holder, functools.partial):
        yield from ((f".{name}", getattr(holder, name)) for name in ("func", "args", "keywords"))
    elif isinstance(holder, dict):
        yield from ((f"[{key!r}]", each) for key, each in holder.items())
    elif isinstance(holder, Collection) and not isinstance(holder, (str, bytes)):
        yield from ((f"[{index}]", each) for index, each in enumerate(holder))
    else:
        yield from ((f".{name}", each) for name, each in getattr(holder, "__dict__", {}).items())
        slots = [name for each in type(holder).__mro__ for name in vars(each).get("__slots__", ())]
        yield from ((f".{name}", getattr(holder, name)) for name in slots if hasattr(holder, name))
        yield f" -> class {type(holder).__qualname__}", type(holder)


def _parts_of_function(function: Any) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None:
        yield ".__wrapped__", wrapped
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f" -> variable {name!r}", cell.cell_contents
        except ValueError:  # the variable is not assigned yet
            continue
    names = _global_names(code)
    yield from (
        (f" -> global {name!r}", function.__globals__[name]) for name in names if name in function.__globals__
    )
    positional, defaults = code.co_varnames[: code.co_argcount], function.__defaults__ or ()
    named = zip(reversed(positional), reversed(defaults), strict=False)  # the last parameters have defaults
    for name, each in [*named, *(function.__kwdefaults__ or {}).items()]:
        yield f" -> default of {name!r}", each
    yield from ((f" -> annotation of {name!r}", each) for name, each in function.__annotations__.items())
    yield from ((f".{name}", each) for name, each in vars(function).items())


def _global_names(code: Any) -> list[str]:
    """Return the names in code, and in functions that it defines."""
    inner = [name for each in code.co_consts if isinstance(each, type(code)) for name in _global_names(each)]
    return [*code.co_names, *inner]


def _unwrapped(attribute: Any) -> Any:
    """Return the function in an attribute of a class."""
    if isinstance(attribute, (staticmethod, classmethod)):
        return attribute.__func__
    return attribute.fget if isinstance(attribute, property) else attribute
