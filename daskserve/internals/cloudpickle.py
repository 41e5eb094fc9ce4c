"""A pickler for user code, and the parts of cloudpickle that its documentation does not describe.

cloudpickle stores functions and classes by value if the receiver has no module with them. They may refer to
objects that belong to this process and cannot be pickled: the variables of the function that defines a
pydantic model, caches, locks, and the types in `by_value`. The receiver gets new objects instead, or none.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import EnumMeta
from io import BytesIO, TextIOWrapper
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias, TypeVar

from daskserve.internals import by_value, ipython
from daskserve.internals.checking import needs
from daskserve.internals.ordered_sets import PLAIN, OrderedSet, SetOrder
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
        _is_registered_pickle_by_value,
        _lookup_module_and_qualname,
        _make_skeleton_enum,
        _should_pickle_by_reference,
        _whichmodule,
    )

    check.attributes(Pickler, "reducer_override")
    # For a class, the third item of the result has its attributes and slots.
    check.parameters(_dynamic_class_reduce, "obj")
    check.parameters(_class_getstate, "obj")
    # The second item of the result: the arguments of `CodeType`.
    check.parameters(_code_reduce, "obj")
    check.parameters(_lookup_module_and_qualname, "obj", "name")
    check.parameters(_whichmodule, "obj", "name")
    check.parameters(
        _make_skeleton_enum, "bases", "name", "qualname", "members", "module", "class_tracker_id", "extra"
    )

MAIN = "__main__"
HOOK = "__init_subclass__"
MOVE_TO_MODULE = "Define it in a module that the workers can import."
#: Index of the file's name in the arguments of `CodeType`.
FILE_ARGUMENT = 10
#: The file name that cloudpickle gives to code since 3.1.3.
NO_FILE = "<dynamic-code>"
#: Packages whose objects get new locks, like objects of the program's own classes, because their locks only
#: protect caches.
FRAMEWORKS = ("fastapi.", "starlette.")
STANDARD_LIBRARY = sys.stdlib_module_names - {"builtins", MAIN}
CONTAINERS = frozenset({dict, list, tuple, set, frozenset, deque, defaultdict, OrderedDict})
#: The depth of containers, and the number of items of each, up to which locks are searched.
SEARCHED_DEPTH = 3
SEARCHED_ITEMS = 1000
#: The types whose objects are pickled as a name in their module if code has imported them from there. A copy
#: would not be the object that the module uses.
SHARED_TYPES = frozenset({*by_value.RENEWED, *by_value.REBUILT, *by_value.LOCK_HOLDERS})

#: A module and the name of an object in it.
ModulePlace: TypeAlias = tuple[str, str]


class NotSentError(pickle.PicklingError):
    """An object could be pickled, but would be missing or different at the receiver."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.remedy = remedy


class CodePickler(Pickler):  # type: ignore[misc]
    """Pickles user code, by value where the receiver does not have its module.

    Locks are rebuilt if they belong to code, or to an object whose class is pickled by value.

    Parameters
    ----------
    substitute : callable, optional
        Returns the reduced form of an object, like ``__reduce__``, or `NotImplemented`.
    classes : dict, optional
        Receives all pickled classes. The value is True if this process pickles the class by value for the
        first time.
    places : mapping, optional
        The ids of objects to pickle as a name in a module, see `trace`.
    """

    def __init__(
        self,
        file: Any,
        *,
        substitute: Callable[[Any], Any] | None = None,
        classes: dict[type, bool] | None = None,
        places: Mapping[int, ModulePlace] | None = None,
        **how: Any,
    ) -> None:
        super().__init__(file, **how)
        self._substitute = substitute
        self._classes = classes
        self._places = {
            id(sys.stdout): ("sys", "stdout"),
            id(sys.stderr): ("sys", "stderr"),
            **(places or {}),
        }
        #: The modules whose own objects are in `_places`.
        self._listed: set[str] = set()
        #: The ids of the locks that are rebuilt.
        self._held: set[int] = set()
        self._travels_by_value: dict[type, bool] = {}
        self._sets = SetOrder()

    def reducer_override(self, value: Any) -> Any:
        """Return how to rebuild a value, or `NotImplemented` for the default."""
        if self._substitute is not None:
            substituted = self._substitute(value)
            if substituted is not NotImplemented:
                return substituted
        kind = type(value)
        if kind is OrderedSet:
            return value.__reduce__()
        if kind is CodeType:
            return _with_its_file(value)
        if isinstance(value, type):
            return self._reduce_class(value)
        if kind is FunctionType:
            return self._reduce_function(value)
        module_name = str(kind.__module__)
        if module_name not in self._listed:
            self._list_objects_of(module_name)
        place = self._places.get(id(value))
        if place is not None:
            return getattr, (sys.modules[place[0]], place[1])
        return self._reduce_object(value, kind)

    def _list_objects_of(self, module_name: str) -> None:
        """Add the places of a module's objects of its own classes: `os.environ`, `dataclasses.MISSING`."""
        self._listed.add(module_name)
        is_known = module_name.startswith(FRAMEWORKS) or module_name.partition(".")[0] in STANDARD_LIBRARY
        if is_known and module_name in sys.modules:
            for name, each in vars(sys.modules[module_name]).copy().items():
                if type(each).__module__ == module_name:
                    self._places.setdefault(id(each), (module_name, name))

    def _noted(self, value: Any, reduce: Callable[[Any], Any]) -> Any:
        """Reduce a class or a type variable, which gets an id if it is pickled by value."""
        may_be_new = value not in _DYNAMIC_CLASS_TRACKER_BY_CLASS
        reduced = reduce(value)
        if self._classes is not None:
            is_new = may_be_new and value in _DYNAMIC_CLASS_TRACKER_BY_CLASS
            self._classes[value] = is_new or self._classes.get(value, False)
        return reduced

    def _reduce_class(self, value: type) -> Any:
        reduced = self._noted(value, super().reducer_override)
        if reduced is NotImplemented or len(reduced) < 3:
            return reduced
        attributes, _ = reduced[2]
        # cloudpickle omits attributes that equal those of a base class, as at the top of a module.
        if NAMESPACE in vars(value) and attributes.pop(NAMESPACE, None) is not None:
            attributes |= needed_namespace(value)
        self._hold(attributes.values())
        attributes.update(self._sets.order(attributes))
        if isinstance(value, EnumMeta):
            return by_value.reduce_enum(value, reduced)
        if HOOK in attributes:
            attributes[HOOK] = by_value.quiet_hook(attributes[HOOK])
        if any(HOOK in vars(each) and self._is_of_code(each) for each in value.__mro__[1:]):
            return by_value.made_quietly, (reduced[0], *reduced[1]), *reduced[2:]
        return reduced

    def _reduce_function(self, value: FunctionType) -> Any:
        reduced = super().reducer_override(value)
        if reduced is NotImplemented:
            return reduced
        if by_value.is_dispatching(value):
            return by_value.reduce_dispatching(value)
        attributes, slots = reduced[2]
        for each in slots["__globals__"].values():
            if type(each) in SHARED_TYPES and id(each) not in self._places:
                place = None if _is_named(each) else place_of(each)
                if place is not None:
                    self._places[id(each)] = place
        self._hold((attributes, slots["__globals__"], slots["__defaults__"], slots["__kwdefaults__"]))
        slots["__globals__"] = self._sets.order(slots["__globals__"])
        if slots["__defaults__"]:
            slots["__defaults__"] = self._sets.order_all(slots["__defaults__"])
        if slots["__kwdefaults__"]:
            slots["__kwdefaults__"] = self._sets.order(slots["__kwdefaults__"])
        if slots["__closure__"]:
            slots["__closure__"] = tuple(map(self._own_cell, slots["__closure__"]))
        return reduced

    def _own_cell(self, cell: CellType) -> CellType:
        """Return a cell with the same content.

        cloudpickle gives each function separate cells when it is unpickled. If functions shared cells in the
        pickle, code would have another digest once it has been unpickled.
        """
        return CellType(*self._sets.order_all(_contents(cell)))

    def _reduce_object(self, value: Any, kind: type) -> Any:
        if id(value) in self._held:
            renew = by_value.renewal_of(value)
            return self._reduce_holder(value, kind) if renew is None else renew(value)
        reduce = by_value.family_reduction(kind)
        if reduce is not None and not _has_reduction(kind):
            return reduce(value)
        rebuild = by_value.REBUILT.get(kind)
        if rebuild is not None:
            return NotImplemented if _is_named(value) else rebuild(value)
        if kind is TypeVar:
            return self._noted(value, self.dispatch_table[kind])
        if kind is CellType:
            self._hold(_contents(value))
        elif kind is MethodType or kind is BuiltinMethodType:
            return _reduce_method(value)
        elif kind is ModuleType and value.__name__ == MAIN:
            raise NotSentError(
                f"The module {MAIN!r} is a different module in other processes", MOVE_TO_MODULE
            )
        elif kind is TextIOWrapper and "+" in value.mode:
            problem = f"What is written to a copy of the file {value.name!r} would be lost"
            raise NotSentError(problem, "Open it where it is used.")
        elif self._is_of_code(kind):
            return self._reduce_holder(value, kind)
        elif _has_reduction(kind) and kind not in self.dispatch_table:
            return _checked(value, value.__reduce_ex__(pickle.HIGHEST_PROTOCOL))
        return NotImplemented

    def _reduce_holder(self, value: Any, kind: type) -> Any:
        """Reduce an object whose locks are rebuilt."""
        reduce = self.dispatch_table.get(kind)
        reduced = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL) if reduce is None else reduce(value)
        if isinstance(reduced, tuple):
            self._hold(reduced[2:3])
            reduced = self._in_order(reduced)
        return _checked(value, reduced)

    def _in_order(self, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(reduced) < 3 or type(reduced[2]) is not dict:
            return reduced
        return *reduced[:2], self._sets.order(reduced[2]), *reduced[3:]

    def _hold(self, values: Iterable[Any], depth: int = SEARCHED_DEPTH) -> None:
        """Record the locks among some values, and in containers among these."""
        for each in values:
            kind = type(each)
            if kind in PLAIN:
                continue
            if kind in CONTAINERS:
                if depth and len(each) <= SEARCHED_ITEMS:
                    self._hold(each.values() if isinstance(each, dict) else each, depth - 1)
            elif kind in by_value.HELD or isinstance(each, threading.local):
                self._held.add(id(each))

    def _is_of_code(self, kind: type) -> bool:
        found = self._travels_by_value.get(kind)
        if found is None:
            module = str(kind.__module__)
            is_standard = module.partition(".")[0] in sys.stdlib_module_names
            found = not is_standard and (
                module.startswith(FRAMEWORKS) or not _should_pickle_by_reference(kind)
            )
            self._travels_by_value[kind] = found
        return found


class SeparatingPickler(CodePickler):
    """Leaves out the values for which ``is_taken`` returns True, and appends each to ``values``, once.

    The pickle contains a number for each of them, which `pickle.Unpickler.persistent_load` receives.
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
    """Keep the name of the code's file, because tracebacks show it, together with the lines if the file can
    be read.

    cloudpickle drops it since 3.1.3, because the cells of a notebook have different names in each process. So
    it is dropped here if the file does not exist. A cell gets the name that its user sees.
    """
    make, arguments = _code_reduce(code)
    name = code.co_filename
    if not os.path.exists(name):
        name = ipython.cell_name(name) or NO_FILE
    return make, (*arguments[:FILE_ARGUMENT], name, *arguments[FILE_ARGUMENT + 1 :])


def _contents(cell: CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # the variable is not assigned yet
        return ()


# ---- objects that are pickled by name


def _is_named(value: Any) -> bool:
    """Return whether a function or type is found by its name in a module that other processes can import."""
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    found = None if name is None else _lookup_module_and_qualname(value, name)
    return found is not None and not _is_registered_pickle_by_value(found[0])


def _reduce_method(value: Any) -> Any:
    """Reduce a method of an object in a module, such as `random.choice`, to its name in the module."""
    owner = value.__self__
    if owner is None or isinstance(owner, (ModuleType, type)):
        return NotImplemented
    module = sys.modules.get(type(owner).__module__)
    if module is None or module.__name__ == MAIN or vars(module).get(value.__name__) != value:
        return NotImplemented
    return getattr, (module, value.__name__)


def _has_reduction(kind: Any) -> bool:
    return kind.__reduce__ is not object.__reduce__ or kind.__reduce_ex__ is not object.__reduce_ex__


def _checked(value: Any, reduced: Any) -> Any:
    if isinstance(reduced, str):
        module = getattr(value, "__module__", None) or _whichmodule(value, reduced) or MAIN
        if module == MAIN or "<locals>" in reduced:
            problem = f"It is pickled as the name {reduced!r}, which is in this program alone"
            raise NotSentError(problem, MOVE_TO_MODULE)
    return reduced


def place_of(value: Any) -> ModulePlace | None:
    """Return the module and global name under which other processes can import this object."""
    for module_name, module in sorted(sys.modules.copy().items()):
        if module_name in (MAIN, "__mp_main__") or not isinstance(module, ModuleType):
            continue
        for name, each in vars(module).copy().items():
            if each is value and not _is_registered_pickle_by_value(module):
                return module_name, name
    return None


def trace(
    value: Any, substitution: Callable[[], Callable[[Any], Any]] | None = None
) -> tuple[dict[int, ModulePlace], list[Any]]:
    """Return the objects to pickle by name in a value, and the path to a part that cannot be pickled.

    The first result maps the ids of objects to their places. These objects cannot be pickled, but code may
    have imported them from a module, as with a connection. The path is empty if everything else can be
    pickled.
    """
    places: dict[int, ModulePlace] = {}
    while True:
        path = _failing_path(value, substitution and substitution(), places)
        found = next(((id(each), place) for each in path if (place := _place_of_object(each))), None)
        if found is None or found[0] in places:
            return places, path
        places[found[0]] = found[1]


def _failing_path(
    value: Any, substitute: Callable[[Any], Any] | None, places: Mapping[int, ModulePlace]
) -> list[Any]:
    reducers = CodePickler(BytesIO(), protocol=pickle.HIGHEST_PROTOCOL, substitute=substitute, places=places)
    pickler = TracingPickler(reducers)
    try:
        pickler.dump(value)
    except Exception:  # a foreign object raised it, and the caller has already seen the error
        return pickler.path
    return []


def _place_of_object(value: Any) -> ModulePlace | None:
    """Return the place of an object that is not a container, a string, a number, or code."""
    other = (str, bytes, int, float, type, FunctionType, ModuleType)
    return None if type(value) in CONTAINERS or isinstance(value, other) else place_of(value)


# ---- the ids of classes


def class_id(cls: type) -> str:
    """Return the id by which processes recognize a class that is pickled by value."""
    return str(_DYNAMIC_CLASS_TRACKER_BY_CLASS[cls])


def has_id(cls: type) -> bool:
    """Return whether this process has pickled or unpickled a class by value."""
    return cls in _DYNAMIC_CLASS_TRACKER_BY_CLASS


def set_class_id(cls: type, wanted: str, *, shares: bool = False) -> bool:
    """Change a class's id, before another process has seen it; return False if another class has the new id.

    With ``shares``, both classes then have the id, and unpickling it in this process still returns the other
    class. If this class is a new definition of the other one, as when the cell of a notebook runs again, both
    have the id, and unpickling it returns this class.
    """
    with _DYNAMIC_CLASS_TRACKER_LOCK:
        other = _DYNAMIC_CLASS_TRACKER_BY_ID.get(wanted)
        is_new_definition = other is not None and _is_new_definition(cls, other)
        is_free = shares or other is None or is_new_definition
        if is_free:
            _DYNAMIC_CLASS_TRACKER_BY_ID.pop(_DYNAMIC_CLASS_TRACKER_BY_CLASS[cls], None)
            _DYNAMIC_CLASS_TRACKER_BY_CLASS[cls] = wanted
            if is_new_definition and not shares:
                _DYNAMIC_CLASS_TRACKER_BY_ID[wanted] = cls
            else:
                _DYNAMIC_CLASS_TRACKER_BY_ID.setdefault(wanted, cls)
        return is_free


def _is_new_definition(cls: type, other: type) -> bool:
    """Return whether the name of ``other`` now stands for ``cls``, of two classes with the same code."""
    name = getattr(cls, "__qualname__", "<locals>")  # type variables have none
    here, there = (
        (getattr(each, "__module__", None), getattr(each, "__qualname__", None)) for each in (cls, other)
    )
    return here == there and "<locals>" not in name


def release_class_ids(modules: Collection[str]) -> dict[str, type]:
    """Free the ids of the classes of some modules; return the classes by id, for `take_class_ids`.

    A module that is imported again has new classes. A new class with unchanged code gets the id of the old
    class.
    """
    with _DYNAMIC_CLASS_TRACKER_LOCK:
        known = list(_DYNAMIC_CLASS_TRACKER_BY_ID.items())
        found = {name: cls for name, cls in known if getattr(cls, "__module__", None) in modules}
        for name in found:
            _DYNAMIC_CLASS_TRACKER_BY_ID.pop(name, None)
        return found


def take_class_ids(classes: Mapping[str, type]) -> None:
    """Restore the ids of classes, even if other classes have these ids now."""
    with _DYNAMIC_CLASS_TRACKER_LOCK:
        _DYNAMIC_CLASS_TRACKER_BY_ID.update(classes)
