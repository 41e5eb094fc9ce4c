"""Routes of a Tornado application are read, added and removed."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from tornado.httputil import HTTPHeaders, HTTPServerRequest, RequestStartLine
from tornado.web import Application, ErrorHandler, RequestHandler

from daskserve.internals.tornado import add_route, path_patterns, remove_route

pytestmark = pytest.mark.smoke


class Page(RequestHandler):
    def initialize(self, text: str) -> None: ...


def finds_page(application: Application, path: str) -> bool:
    start_line = RequestStartLine("GET", path, "HTTP/1.1")
    headers = HTTPHeaders({"Host": "example"})
    request = HTTPServerRequest(start_line=start_line, headers=headers, connection=Mock())
    handler = application.find_handler(request).handler_class  # type: ignore[attr-defined]
    assert handler in (Page, ErrorHandler)
    return handler is Page


def test_a_route_is_added_and_removed() -> None:
    application = Application([("/metrics", Page, {"text": ""})])
    rules = list(application.default_router.rules)
    assert not finds_page(application, "/a")
    first = add_route(application, "/a", Page, {"text": "a"})
    second = add_route(application, "/b", Page, {"text": "b"})
    third = add_route(application, "/a", Page, {"text": "a"})
    assert [finds_page(application, path) for path in ("/a", "/b", "/c")] == [True, True, False]
    remove_route(application, second)
    assert [finds_page(application, path) for path in ("/a", "/b")] == [True, False]
    remove_route(application, first)
    assert finds_page(application, "/a")
    remove_route(application, third)
    assert not finds_page(application, "/a")
    assert application.default_router.rules == rules


def test_the_patterns_are_those_an_application_was_made_with() -> None:
    application = Application([("/prefix/metrics", Page, {"text": ""}), ("/json/.*", Page, {"text": ""})])
    application.add_handlers(".*$", [("/added", Page, {"text": ""})])
    assert list(path_patterns(application)) == ["/prefix/metrics$", "/json/.*$"]
