"""The blocking form of a coroutine function: a verb of a client, or the body of a function of the package."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from daskserve.client.instance.connection import Verbs
from daskserve.errors import BlockingCallError
from daskserve.loops.blocking import finish
from daskserve.payload.shown_errors import shown

P = ParamSpec("P")
T = TypeVar("T")
VerbsT = TypeVar("VerbsT", bound=Verbs)


def finish_call(
    coroutine: Coroutine[Any, Any, T], call: str, instead: str
) -> tuple[T, None] | tuple[None, Exception]:
    """Return the result of a coroutine whose steps block, or its error as users should see it.

    The caller raises the error: a frame fewer in what users see.

    Parameters
    ----------
    call, instead : str
        The call that blocks, and the one to await instead, as users write them.
    """
    try:
        return finish(coroutine), None
    except BlockingCallError:
        return None, BlockingCallError(
            f"{call} would block the event loop that has to run it; use `await {instead}, or call it from "
            "another thread (asyncio.to_thread)."
        )
    except Exception as error:
        return None, shown(error)


def method(
    verb: Callable[Concatenate[VerbsT, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """Return the blocking form of a verb, with its signature and docstring.

    The verb's coroutine runs on the caller's thread. So does the caller's code that it calls, for example to
    pickle arguments, and Ctrl-C interrupts it.
    """
    name = verb.__name__

    @functools.wraps(verb)
    def form(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        async def call() -> T:
            if self._connection.cluster_connection.runs_here():
                raise BlockingCallError
            return await verb(self._verbs, *args, **kwargs)

        result, error = finish_call(
            call(),
            f"client.{name}()",
            f"client.{name}(...)` of the client that serve.start_async() or serve.connect_async() returns",
        )
        if error is not None:
            raise error
        return cast(T, result)

    return form
