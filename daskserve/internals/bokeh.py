"""The undocumented parts of bokeh's server that daskserve uses: adding pages to a running server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from daskserve.internals.checking import needs
from daskserve.internals.tornado import add_route, remove_route

with needs("bokeh", ">=3.1,<4") as check:
    from bokeh.application import Application
    from bokeh.application.handlers.document_lifecycle import DocumentLifecycleHandler
    from bokeh.application.handlers.function import FunctionHandler
    from bokeh.server.contexts import ApplicationContext
    from bokeh.server.tornado import BokehTornado
    from bokeh.server.urls import per_app_patterns
    from bokeh.server.views.ws import WSHandler

    check.fields(BokehTornado, "_applications", "_prefix")
    check.attributes(ApplicationContext, "sessions")


class AddedPages:
    """Pages added to a bokeh server, each with a function that fills its document."""

    def __init__(self, server: Any, pages: Mapping[str, Callable[[Any], None]]) -> None:
        self._server = server
        self._contexts: dict[str, Any] = {}
        self._routes: list[Any] = []
        for path, fill in pages.items():
            application = Application(FunctionHandler(fill), DocumentLifecycleHandler())
            context = ApplicationContext(application, url=path)
            context._loop = server._loop
            server._applications[path] = self._contexts[path] = context
            route = server._prefix + path
            for part, handler, *_ in per_app_patterns:
                arguments = {"application_context": context, "bokeh_websocket_path": f"{route}/ws"}
                if issubclass(handler, WSHandler):
                    # The same as for the server's other pages.
                    arguments |= {"compression_level": None, "mem_level": None}
                self._routes.append(add_route(server, route + part, handler, arguments))

    def remove(self) -> None:
        """Remove the pages, and end their sessions; idempotent."""
        routes, self._routes = self._routes, []
        for each in routes:
            remove_route(self._server, each)
        contexts, self._contexts = self._contexts, {}
        for path, context in contexts.items():
            if self._server._applications.get(path) is context:
                del self._server._applications[path]
            for session in list(context.sessions):
                session.destroy()


def server_among(applications: Iterable[Any]) -> Any:
    """Return the first bokeh server among Tornado's applications; None if there is none."""
    return next((each for each in applications if isinstance(each, BokehTornado)), None)
