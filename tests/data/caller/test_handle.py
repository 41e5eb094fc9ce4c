"""A handle as text and as HTML."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from tables import each_case

from daskserve.data.caller.calls.call_options import CallOptions
from daskserve.errors import BadRequestError
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


@each_case(
    ("options", "message"),
    [
        ({"timeout_s": 0}, "timeout_s must be more than 0, or None; got 0"),
        ({"timeout_s": float("nan")}, "timeout_s must be more than 0"),
        ({"timeout_s": True}, "timeout_s must be more than 0"),
        ({"stream": "no"}, "stream must be True or False; got 'no'"),
        ({"method_name": 1}, "method_name must be a string; got 1"),
        ({"multiplexed_model_id": None}, "multiplexed_model_id must be a string; got None"),
        ({"session_id": b"a"}, "session_id must be a string"),
        ({"priority": True}, "priority must be a number or a name; got True"),
        ({"priority": 1.5}, "priority must be a number or a name; got 1.5"),
        ({"priority": 101}, "priority must be from -100 to 100; got 101"),
        ({"priority": -101}, "priority must be from -100 to 100; got -101"),
        ({"result": "values"}, "result must be 'value' or 'future'; got 'values'"),
        ({"result": "future", "stream": True}, "result='future' and stream=True exclude each other"),
        ({"request_serialization": "yaml"}, "request_serialization.*'yaml'"),
        ({"response_serialization": "yaml"}, "response_serialization.*'yaml'"),
    ],
)
def test_an_option_of_a_call_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        CallOptions(**options)


@each_case(
    "options",
    [
        {"timeout_s": 0.001},
        {"priority": 100},
        {"priority": -100},
        {"priority": "high"},
        {"result": "future"},
        {"stream": True},
        {"request_serialization": "pickle"},
    ],
)
def test_options_of_a_call_that_differ_from_the_default_are_named(options: dict[str, Any]) -> None:
    differences = CallOptions(**options).differences()
    assert [value for _, value in differences] == list(options.values())
    assert CallOptions().changed(dict(differences)) == CallOptions(**options)
    assert CallOptions().differences() == ()
