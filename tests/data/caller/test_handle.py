"""What a handle shows of its endpoint."""

from __future__ import annotations

import pickle

from daskserve.testing import local_instance


def test_a_handle_shows_its_route_and_follows_changes() -> None:
    with local_instance() as client:
        client.deploy("echo", lambda value: value, route_prefix="/first")
        handle = client.get_handle("echo")
        assert repr(handle) == "<Handle of 'echo' route='/first' method='__call__'>"
        assert repr(pickle.loads(pickle.dumps(handle))) == repr(handle)
        assert handle.remote(1).result() == 1
        client.deploy("echo", lambda value: value, route_prefix="/second")
        assert "route='/second' method='other'" in repr(handle.options(method_name="other"))
        shown = handle.options(session_id="<b>")._repr_html_()
        for name, value in (
            ("handle of", "echo"),
            ("route", "/second"),
            ("session_id", "&#x27;&lt;b&gt;&#x27;"),
        ):
            assert f"<tr><th>{name}</th><td>{value}</td></tr>" in shown
        assert "timeout_s" not in shown
        client.deploy("echo", lambda value: value, route_prefix=None)
        assert "route=None" in repr(handle)
        assert "<th>route</th><td>none, by handle only</td>" in handle._repr_html_()


def test_a_method_of_a_deployment_may_be_named_route() -> None:
    class Router:
        def route(self, value: int) -> int:
            return value + 1

        def __call__(self, request: object) -> None: ...

    with local_instance() as client:
        client.deploy("router", Router)
        assert client.get_handle("router").route.remote(1).result() == 2
