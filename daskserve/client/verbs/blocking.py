"""The methods of a blocking client, each made from a verb."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from daskserve.client.instance.connection import InstanceConnection, Verbs
from daskserve.errors import BlockingCallError
from daskserve.loops.blocking import finish
from daskserve.payload.shown_errors import shown

P = ParamSpec("P")
T = TypeVar("T")
VerbsT = TypeVar("VerbsT", bound=Verbs)
VerbsT_co = TypeVar("VerbsT_co", bound=Verbs, covariant=True)


class HasVerbs(Protocol[VerbsT_co]):
    """A client whose methods block, with verbs whose calls block."""

    _connection: InstanceConnection

    @property
    def _verbs(self) -> VerbsT_co: ...


def method(
    verb: Callable[Concatenate[VerbsT, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[HasVerbs[VerbsT], P], T]:
    """Return the blocking form of a verb, with its signature and docstring.

    The verb's coroutine runs on the caller's thread. So does the caller's code that it calls, for example to
    pickle arguments, and Ctrl-C interrupts it.
    """
    name = verb.__name__

    @functools.wraps(verb)
    def form(self: HasVerbs[VerbsT], /, *args: P.args, **kwargs: P.kwargs) -> T:
        if self._connection.cluster_connection.runs_here():
            raise BlockingCallError(
                f"client.{name}() would block the event loop that has to run it; use `await "
                f"client.{name}(...)` of the client that serve.start_async() or serve.connect_async() "
                "returns, or call it from another thread (asyncio.to_thread)."
            )
        try:
            return finish(verb(self._verbs, *args, **kwargs))
        except Exception as error:
            raise shown(error)  # noqa: B904 (it is the same error)

    return form
