"""How objects of the standard library that a program defines are rebuilt in another process.

Pickle either refuses such an object, or stores it by the name of its variable, which the other process does
not have. State that is only valid in this process is not sent: a cache arrives empty, a lock unlocked, a
context variable with its default, a pool without threads.
"""

from __future__ import annotations

import asyncio
import contextvars
import copyreg
import functools
import inspect
import queue
import sys
import threading
import typing
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType
from typing import Any

from daskserve.internals.checking import PYTHON, needs

with needs(PYTHON, ">=3.11,<3.15") as check:
    check.attributes(functools, "_lru_cache_wrapper")
    check.fields(ThreadPoolExecutor, "_max_workers", "_thread_name_prefix", "_initializer", "_initargs")

#: The type of functions decorated with `functools.lru_cache` or `functools.cache`.
CACHED_FUNCTION: type[Any] = functools._lru_cache_wrapper
_DISPATCHING = functools.singledispatch(len).__code__  # type: ignore[attr-defined]
LOCKS: tuple[type[Any], ...] = (type(threading.Lock()), type(threading.RLock()))
#: Objects whose attributes are locks.
LOCK_HOLDERS: tuple[type[Any], ...] = (
    threading.Condition,
    threading.Semaphore,
    threading.BoundedSemaphore,
    threading.Event,
    threading.Barrier,
    queue.Queue,
    queue.LifoQueue,
    queue.PriorityQueue,
)
ASYNCIO_HOLDERS: tuple[type[Any], ...] = (
    asyncio.Lock,
    asyncio.Event,
    asyncio.Condition,
    asyncio.Semaphore,
    asyncio.BoundedSemaphore,
    asyncio.Queue,
    asyncio.LifoQueue,
    asyncio.PriorityQueue,
)


def made(kind: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a function with keyword arguments, which pickle's instructions cannot do."""
    return kind(*args, **kwargs)


# ---- functions and variables


def made_cached(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Any:
    """Return a function with an empty cache."""
    return functools.lru_cache(**parameters)(function)


def reduce_cached(value: Any) -> Any:
    """Rebuild a function that `functools.lru_cache` returned, without its cached results."""
    function = value.__wrapped__
    given = {*functools.WRAPPER_ASSIGNMENTS, "__wrapped__", "cache_parameters", *vars(function)}
    own = {name: each for name, each in vars(value).items() if name not in given}
    return made_cached, (function, value.cache_parameters()), own or None


def is_dispatching(function: FunctionType) -> bool:
    """Return whether `functools.singledispatch` returned a function."""
    return function.__code__ is _DISPATCHING


def reduce_dispatching(function: Any) -> Any:
    """Rebuild a function that `functools.singledispatch` returned, which holds weak references to types."""
    implementations = {kind: each for kind, each in function.registry.items() if kind is not object}
    # Restored after the function, because an implementation may call it.
    state = function.registry[object], implementations
    return functools.singledispatch, (function.__wrapped__,), state, None, None, _register


def _register(function: Any, state: tuple[Any, Mapping[type[Any], Any]]) -> None:
    default, implementations = state
    function.register(object, default)
    for kind, each in implementations.items():
        function.register(kind, each)


def _reduce_cached_property(value: Any) -> Any:
    state = {name: each for name, each in vars(value).items() if type(each) not in LOCKS}
    return functools.cached_property, (value.func,), state


def _reduce_context_variable(value: Any) -> Any:
    # Outside of all contexts, a variable has its default.
    default = contextvars.Context().run(_default_of, value)
    return made, (contextvars.ContextVar, (value.name,), default)


def _default_of(variable: contextvars.ContextVar[Any]) -> dict[str, Any]:
    try:
        return {"default": variable.get()}
    except LookupError:
        return {}


# ---- typing


def _reduce_new_type(value: Any) -> Any:
    names = {name: getattr(value, name) for name in ("__module__", "__qualname__")}
    return typing.NewType, (value.__name__, value.__supertype__), names


def _reduce_param_spec(value: Any) -> Any:
    options = {
        "bound": value.__bound__,
        "covariant": value.__covariant__,
        "contravariant": value.__contravariant__,
    }
    return made, (typing.ParamSpec, (value.__name__,), options)


def _reduce_type_alias(value: Any) -> Any:
    return made, (type(value), (value.__name__, value.__value__), {"type_params": value.__type_params__})


# ---- collections, and objects that threads and tasks share


def _reduce_weak_mapping(value: Any) -> Any:
    return type(value), (), None, None, iter(list(value.items()))


def _reduce_for_asyncio(value: Any) -> Any:
    """Rebuild a lock, an event or a queue of asyncio, which belongs to the loop that used it first."""
    state = {name: each for name, each in vars(value).items() if name != "_loop"}
    if isinstance(value, asyncio.Lock):
        state["_locked"] = False
    return copyreg.__newobj__, (type(value),), state  # type: ignore[attr-defined]


def family_reduction(kind: type[Any]) -> Callable[[Any], Any] | None:
    """Return the function that `copyreg` has for a base class of Starlette; None if there is none.

    Pickle itself looks up only the class of an object, and not its base classes.
    """
    for base in kind.__mro__[1:]:
        if base.__module__.startswith("starlette.") and base in copyreg.dispatch_table:
            found: Callable[[Any], Any] = copyreg.dispatch_table[base]
            return found
    return None


#: The types of objects that are always rebuilt.
REBUILT: Mapping[type[Any], Callable[[Any], Any]] = {
    CACHED_FUNCTION: reduce_cached,
    functools.cached_property: _reduce_cached_property,
    contextvars.ContextVar: _reduce_context_variable,
    typing.NewType: _reduce_new_type,
    typing.ParamSpec: _reduce_param_spec,
    typing.TypeVarTuple: lambda value: (typing.TypeVarTuple, (value.__name__,)),
    weakref.WeakKeyDictionary: _reduce_weak_mapping,
    weakref.WeakValueDictionary: _reduce_weak_mapping,
    **dict.fromkeys(ASYNCIO_HOLDERS, _reduce_for_asyncio),
    **({vars(typing)["TypeAliasType"]: _reduce_type_alias} if sys.version_info >= (3, 12) else {}),
}


def _reduce_pool(pool: Any) -> Any:
    arguments = pool._max_workers, pool._thread_name_prefix, pool._initializer, pool._initargs
    return ThreadPoolExecutor, arguments


#: The types of objects that are rebuilt only if code uses them. They are refused as arguments, because a copy
#: of a lock or a pool would not be shared with the caller.
RENEWED: Mapping[type[Any], Callable[[Any], Any]] = {
    LOCKS[0]: lambda _: (threading.Lock, ()),
    LOCKS[1]: lambda _: (threading.RLock, ()),
    threading.local: lambda _: (threading.local, ()),
    ThreadPoolExecutor: _reduce_pool,
}


#: All types of objects that are rebuilt only if code uses them.
HELD = frozenset({*RENEWED, *LOCK_HOLDERS, queue.SimpleQueue})


def renewal_of(value: Any) -> Callable[[Any], Any] | None:
    """Return the reducer for an object that code uses; None if it is not one of these types."""
    found = RENEWED.get(type(value))
    if found is not None:
        return found
    if type(value) is queue.SimpleQueue and value.empty():
        return lambda _: (queue.SimpleQueue, ())
    if isinstance(value, threading.local) and not _takes_arguments(type(value)):
        return lambda _: (type(value), ())
    return None


def _takes_arguments(cls: type[Any]) -> bool:
    init = vars(cls).get("__init__")
    return init is not None and len(inspect.signature(init).parameters) > 1


# ---- classes

_is_rebuilding: contextvars.ContextVar[bool] = contextvars.ContextVar("is_rebuilding", default=False)


def made_quietly(make: Callable[..., Any], *args: Any) -> Any:
    """Create a class without running the hooks that `quiet_hook` replaces."""
    token = _is_rebuilding.set(True)
    try:
        return make(*args)
    finally:
        _is_rebuilding.reset(token)


def quiet_hook(hook: Any) -> Any:
    """Return an ``__init_subclass__`` that does not run for classes that are rebuilt.

    The hook ran for the original class, and its effects are pickled with the class. A rebuilt class has no
    attributes yet, and the arguments of the hook are not known.
    """
    function = hook.__func__

    @functools.wraps(function)
    def __init_subclass__(cls: type, **kwargs: Any) -> None:
        if not _is_rebuilding.get():
            function(cls, **kwargs)

    return classmethod(__init_subclass__)  # type: ignore[arg-type]


# ---- enumerations

#: Attributes of a member that its class sets.
_MEMBER_NAMES = frozenset({"_value_", "_name_", "__objclass__", "_sort_order_"})


class EnumMember:
    """A member of an enumeration: the arguments of its ``__new__``, and its attributes.

    cloudpickle keeps only the values, without the effects of the enumeration's ``__new__`` or ``__init__``.
    """

    def __init__(self, arguments: tuple[Any, ...], value: Any, attributes: Mapping[str, Any]) -> None:
        self.arguments = arguments
        self.value = value
        self.attributes = attributes


def _new_member(cls: Any, saved: Any) -> Any:
    if isinstance(saved, tuple):  # values of an enumeration of tuples arrive in this form
        (saved,) = saved
    member = cls._member_type_.__new__(cls, *saved.arguments)
    member._value_ = saved.value
    vars(member).update(saved.attributes)
    return member


def _ignore(*_: Any) -> None: ...


#: The methods with which an enumeration is rebuilt.
_MAKERS: Mapping[str, Any] = {"__new__": _new_member, "__init__": _ignore}


def made_enum(make: Callable[..., Any], bases: Any, name: str, members: Mapping[str, Any], *rest: Any) -> Any:
    """Create an enumeration with these members, or return the one that this process already has."""
    qualname, *others = rest
    cls = make(bases, name, qualname, {**_MAKERS, **members} if members else {}, *others)
    for each, maker in (("__init__", _ignore), ("__new_member__", _new_member)):
        if vars(cls).get(each) is maker:
            type.__delattr__(cls, each)
    return cls


def reduce_enum(cls: Any, reduced: Any) -> Any:
    """Add the aliases, and the attributes of members, to cloudpickle's reduction of an enumeration."""
    make, (bases, name, qualname, _, *others), (attributes, slots), *rest = reduced
    new_arguments = getattr(cls._member_type_, "__getnewargs__", lambda _: ())
    members = {}
    for each, member in cls.__members__.items():
        own = {key: item for key, item in vars(member).items() if key not in _MEMBER_NAMES}
        members[each] = EnumMember(new_arguments(member), member.value, own)
        attributes.pop(each, None)
    return made_enum, (make, bases, name, members, qualname, *others), (attributes, slots), *rest
