"""The blocking form of a coroutine function: a verb of a client, or the body of a function of the package."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from daskserve.client.instance.connection import Verbs
from daskserve.errors import BlockingCallError
from daskserve.loops.blocking import finish
from daskserve.payload.shown_errors import shown

P = ParamSpec("P")
T = TypeVar("T")
VerbsT = TypeVar("VerbsT", bound=Verbs)


def finish_call(coroutine: Coroutine[Any, Any, T], call: str, instead: str) -> T:
    """Return the result of a coroutine whose steps block; its errors are shown as users should see them.

    Parameters
    ----------
    call, instead : str
        The call that blocks, and the one to await instead, as users write them.
    """
    try:
        return finish(coroutine)
    except BlockingCallError:
        raise BlockingCallError(
            f"{call} would block the event loop that has to run it; use `await {instead}, or call it from "
            "another thread (asyncio.to_thread)."
        ) from None
    except Exception as error:
        raise shown(error)  # noqa: B904 (it is the same error)


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

        return finish_call(
            call(),
            f"client.{name}()",
            f"client.{name}(...)` of the client that serve.start_async() or serve.connect_async() returns",
        )

    return form
