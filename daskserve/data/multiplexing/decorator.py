"""``multiplexed``, which lets the replicas of a deployment share many models."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar, overload

from daskserve.data.batching.checks import check_seconds, check_whole
from daskserve.data.multiplexing.function import MultiplexedFunction
from daskserve.data.multiplexing.ids import check_model_id
from daskserve.data.multiplexing.loader import ModelLimits

F = TypeVar("F", bound=Callable[..., Awaitable[Any]])


@overload
def multiplexed(func: F, /) -> F: ...


@overload
def multiplexed(
    func: None = None,
    max_num_models_per_replica: int = 3,
    *,
    max_bytes: int | None = None,
    size_of: Callable[[Any], float] | None = None,
    unload: Callable[[Any], Any] | None = None,
    preload: Iterable[str] = (),
    pinned: Iterable[str] = (),
    idle_timeout_s: float | None = None,
    load_timeout_s: float | None = None,
) -> Callable[[F], F]: ...


def multiplexed(
    func: Callable[..., Any] | None = None,
    max_num_models_per_replica: int = 3,
    *,
    max_bytes: int | None = None,
    size_of: Callable[[Any], float] | None = None,
    unload: Callable[[Any], Any] | None = None,
    preload: Iterable[str] = (),
    pinned: Iterable[str] = (),
    idle_timeout_s: float | None = None,
    load_timeout_s: float | None = None,
) -> Any:
    """Keep the models that an async function or method loads, and share them among requests.

    The function takes the id of a model and returns the model. A call with an id whose model is loaded
    returns it at once. Otherwise the function loads it; calls with the same id wait for that one load, and
    calls with other ids do not wait for it. If the replica holds ``max_num_models_per_replica`` models, the
    least recently used model is unloaded first, or another model that is used far less often. A model that a
    running request uses is not unloaded. Requests for a model go to a replica that has it, if one has room.

    Unloading calls the model's ``__del__``, ``aclose`` or ``close``, once. An ``async def`` is awaited; a
    plain one runs in a thread.

    Parameters
    ----------
    max_num_models_per_replica : int
        Maximum number of models in a replica; -1 for no limit.
    max_bytes : int, optional
        Maximum size of the models in a replica, in bytes.
    size_of : callable, optional
        Takes a model and returns its size in bytes; default: the model's ``nbytes``.
    unload : callable, optional
        Takes a model and unloads it, instead of the model's own method. It may be ``async def``.
    preload : iterable of str
        Ids of models that a replica loads before it takes requests. If a load fails, the replica does not
        start.
    pinned : iterable of str
        Ids of models that are not unloaded after they have been loaded.
    idle_timeout_s : float, optional
        Unload a model that no request has used for this long, in seconds.
    load_timeout_s : float, optional
        Maximum duration of a load, in seconds; then its requests fail.

    Raises
    ------
    TypeError, ValueError
        The function is not ``async def`` with one argument, or an option is invalid.

    Examples
    --------
    >>> class Models:
    ...     @multiplexed(max_num_models_per_replica=8)
    ...     async def get_model(self, model_id: str):
    ...         return await load_weights(model_id)
    ...
    ...     async def __call__(self, request):
    ...         model = await self.get_model(get_multiplexed_model_id())
    ...         return model.predict(await request.json())
    """
    limits = ModelLimits(
        max_models=_max_models(max_num_models_per_replica),
        max_bytes=None if max_bytes is None else check_whole("max_bytes", max_bytes, other=", or None"),
        size_of=_checked("size_of", size_of),
        unload=_checked("unload", unload),
        preload=_ids("preload", preload),
        pinned=_ids("pinned", pinned),
        idle_timeout_s=None if idle_timeout_s is None else check_seconds("idle_timeout_s", idle_timeout_s),
        load_timeout_s=None if load_timeout_s is None else check_seconds("load_timeout_s", load_timeout_s),
    )
    _check_room(limits)

    def decorate(function: Callable[..., Any]) -> MultiplexedFunction:
        _check_function(function)
        return MultiplexedFunction(function, limits)

    return decorate if func is None else decorate(func)


def _check_function(function: Any) -> None:
    if not inspect.isfunction(function):
        raise TypeError(f"Only an `async def` function or method can be multiplexed, got {function!r}.")
    if not inspect.iscoroutinefunction(function):
        raise TypeError(
            f"A multiplexed function must be `async def`; {function.__qualname__} is not. Run blocking "
            "code in it with asyncio.to_thread."
        )
    parameters = list(inspect.signature(function).parameters.values())
    positional = [
        each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    # Whether it is a method is not known yet: a function has one argument, a method also has `self`.
    if not 1 <= len(positional) <= 2 or len(positional) != len(parameters):
        raise TypeError(
            f"A multiplexed function takes one argument, the id of a model, which a method takes after "
            f"`self`; {function.__qualname__} takes {inspect.signature(function)}."
        )
    if len(positional) == 1 and positional[0].name == "self":
        raise TypeError(f"{function.__qualname__} takes no id of a model; add an argument after `self`.")


def _max_models(value: Any) -> int | None:
    return None if value == -1 else check_whole("max_num_models_per_replica", value, other=", or -1")


def _checked(name: str, function: Any) -> Any:
    if function is not None and not callable(function):
        raise TypeError(f"{name} must be a function of a model, or None; got {function!r}")
    if name == "size_of" and inspect.iscoroutinefunction(function):
        raise TypeError("size_of must be a plain function, not `async def`")
    return function


def _ids(name: str, ids: Any) -> tuple[str, ...]:
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise TypeError(f"{name} must be a list of ids of models; got {ids!r}")
    return tuple(dict.fromkeys(check_model_id(each) for each in ids))


def _check_room(limits: ModelLimits) -> None:
    if limits.max_models is None:
        return
    for name, ids in (("preload", limits.preload), ("pinned", limits.pinned)):
        if len(ids) > limits.max_models:
            raise ValueError(
                f"{name} names {len(ids)} models, more than max_num_models_per_replica, which is "
                f"{limits.max_models}"
            )
