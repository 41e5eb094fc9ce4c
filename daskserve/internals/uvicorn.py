"""The parts of uvicorn that its documentation does not describe, and that daskserve uses.

uvicorn documents its server and its command line. Its protocol class has no public name; `uvicorn.Server`,
which has one, handles signals and ends the event loop.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn import Config

from daskserve.internals.checking import needs

with needs("uvicorn", ">=0.30,<1") as check:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    from uvicorn.server import ServerState

    check.fields(HttpToolsProtocol, "connections", "flow", "loop", "parser", "transport")
    check.attributes(HttpToolsProtocol, "connection_made", "eof_received")
    check.parameters(HttpToolsProtocol.__init__, "self", "config", "server_state", "app_state", "_loop")


class ProtocolState(ServerState):
    """What the protocols of one server share.

    Parameters
    ----------
    app : ASGI application
        The protocol class wants to know it.
    """

    def __init__(self, app: Any) -> None:
        super().__init__()
        # Most of this is for `uvicorn.Server`, but protocols read it too.
        self.config = Config(
            app,
            loop="none",
            http=HTTPProtocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            proxy_headers=False,
        )
        self.config.load()


class HTTPProtocol(HttpToolsProtocol):
    """A protocol for one connection, made in the event loop that serves it.

    Attributes
    ----------
    connections : set
        All protocols of the server; `connection_made` adds this one.
    flow : object
        Its ``pause_reading`` and ``resume_reading`` may be called repeatedly.
    loop : asyncio.AbstractEventLoop
        The event loop.
    transport : asyncio.Transport
        The connection.
    """

    def __init__(self, state: ProtocolState) -> None:
        super().__init__(state.config, state, {}, asyncio.get_running_loop())
        self.parser = None  # type: ignore[assignment]  # not used, and it refers to this object
