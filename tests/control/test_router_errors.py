"""The failure of a user's request router appears in the status and in the events."""

from __future__ import annotations

import threading
from typing import Any

from dask_processes import PATIENCE_S, poll_for

import daskserve as serve
from daskserve.control.observed.router_errors import MAX_ROUTERS, REPEAT_S, STALE_S, RouterErrors
from daskserve.request_router import RequestRouter
from daskserve.testing import local_instance


class Fails(RequestRouter):
    async def choose_replicas(self, candidate_replicas: Any, pending_request: Any = None) -> Any:
        raise ValueError("no table of sessions")


def test_an_error_is_as_old_as_its_last_report() -> None:
    errors = RouterErrors()
    assert errors.report("p", {"a": "it hangs"}, 0) == ["a"]
    assert errors.report("q", {"a": "it hangs"}, 1) == []
    assert errors.text_of("a", 2) == "it hangs (in 2 processes)"
    assert errors.report("q", {}, 3) == []
    assert errors.text_of("a", 3) == "it hangs"
    assert errors.text_of("a", STALE_S) == ""
    assert errors.report("p", {"a": "it raises"}, 4) == ["a"]
    assert errors.report("p", {"a": "it raises"}, REPEAT_S) == []
    assert errors.report("p", {"a": "it raises"}, REPEAT_S + 4) == ["a"]
    errors.forget("a")
    assert errors.text_of("a", REPEAT_S + 4) == ""


def test_an_error_from_before_the_clock_was_set_back_is_over() -> None:
    errors = RouterErrors()
    errors.report("p", {"a": "it hangs"}, 2 * REPEAT_S)
    assert errors.text_of("a", 0) == ""
    assert errors.report("q", {"a": "it hangs"}, 0) == ["a"]
    assert errors.text_of("a", 0) == "it hangs"


def test_processes_that_have_ended_leave_their_places_to_others() -> None:
    errors = RouterErrors()
    for number in range(MAX_ROUTERS):
        errors.report(f"p{number}", {"a": "it hangs"}, 0)
    errors.report("q", {"a": "it hangs"}, STALE_S)
    assert errors.text_of("a", STALE_S) == "it hangs"


def test_a_router_that_fails_is_in_the_status_and_the_events() -> None:
    config = {"request_router_class": Fails}

    def message() -> str:
        return client.status().backends["a/answer"].message

    def answer(number: int) -> int:
        return number

    with local_instance() as client:
        app = serve.deployment(answer)
        handle = client.run(app.options(request_router_config=config).bind(), name="a", route_prefix=None)
        # Until the router is loaded, requests go without it.
        text = poll_for(lambda: handle.remote(1).result(PATIENCE_S) and message())
        assert "raised ValueError: no table of sessions" in text
        assert "go to the replicas with the least load" in text
        assert client.status().backends["a/answer"].status == "HEALTHY"
        (event,) = (each for each in client.events() if each.kind == "ROUTER_FAILED")
        assert text in event.message
        assert event.application == "a"
        client.run(app.bind(), name="a", route_prefix=None)
        poll_for(lambda: not message())


def test_a_deployment_that_was_deleted_and_deployed_again_has_no_error_of_the_old_one() -> None:
    config = {"request_router_class": Fails}
    app = serve.deployment(name="echo", request_router_config=config)(lambda number: number)

    def current_error() -> str:
        replicas = handle._process.shared["routers"].router("a/echo").only
        return str(replicas._waiting.routing.current_error())

    with local_instance() as client:
        handle = client.run(app.bind(), name="a", route_prefix=None)
        poll_for(lambda: handle.remote(1).result(PATIENCE_S) and current_error())
        client.delete_application("a")
        handle = client.run(app.bind(), name="a", route_prefix=None)
        assert current_error() == ""
        # The last report of the old router may arrive after the deletion. It would stay for STALE_S.
        poll_for(lambda: not client.status().backends["a/echo"].message, timeout_s=STALE_S / 3)


def test_the_thread_of_a_router_ends_with_the_instance() -> None:
    app = serve.deployment(name="ends", request_router_config={"request_router_class": Fails})(abs)
    with local_instance() as client:
        handle = client.run(app.bind(), name="a", route_prefix=None)
        assert handle.remote(-1).result(PATIENCE_S) == 1
        assert "daskserve-router-a/ends" in thread_names()
    poll_for(lambda: "daskserve-router-a/ends" not in thread_names())


def thread_names() -> set[str]:
    return {each.name for each in threading.enumerate()}
