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


def blocking_form(
    start: Callable[..., Coroutine[Any, Any, T]], source: Callable[..., Any], call: str, instead: str
) -> Callable[..., T]:
    """Return a function that runs coroutines whose steps block, and raises their errors for users.

    Parameters
    ----------
    start
        Returns the coroutine for some arguments.
    source
        The coroutine function whose docstring and signature the function has.
    call, instead : str
        The call that blocks, and the one to await instead, as users write them.
    """

    @functools.wraps(source)
    def form(*args: Any, **kwargs: Any) -> T:
        try:
            return finish(start(*args, **kwargs))
        except BlockingCallError:
            error: Exception = BlockingCallError(
                f"{call} would block the event loop that has to run it; use `await {instead}, or call it "
                "from another thread (asyncio.to_thread)."
            )
        except Exception as raised:
            error = shown(raised)
        raise error  # users see one frame less, and no context

    return form


def method(
    verb: Callable[Concatenate[VerbsT, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """Return the blocking form of a verb, with its signature and docstring.

    The verb's coroutine runs on the caller's thread. User code that it calls, for example to pickle
    arguments, also runs there, and Ctrl-C interrupts it.
    """

    async def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if self._connection.cluster_connection.runs_here():
            raise BlockingCallError
        return await verb(self._verbs, *args, **kwargs)

    name = verb.__name__
    instead = f"client.{name}(...)` of the client that serve.start_async() or serve.connect_async() returns"
    return blocking_form(call, verb, f"client.{name}()", instead)
