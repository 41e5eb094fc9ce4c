"""A user's request router that fails is in the status and in the events."""

from __future__ import annotations

from typing import Any

from dask_processes import PATIENCE_S, poll_for

import daskserve as serve
from daskserve.control.observed.router_troubles import MAX_ROUTERS, STALE_S, TELL_AGAIN_S, RouterTroubles
from daskserve.request_router import RequestRouter
from daskserve.testing import local_instance


class Fails(RequestRouter):
    async def choose_replicas(self, candidate_replicas: Any, pending_request: Any = None) -> Any:
        raise ValueError("no table of sessions")


def test_a_trouble_is_as_old_as_its_last_report() -> None:
    troubles = RouterTroubles()
    assert troubles.report("p", {"a": "it hangs"}, 0) == ["a"]
    assert troubles.report("q", {"a": "it hangs"}, 1) == []
    assert troubles.text_of("a", 2) == "it hangs (in 2 processes)"
    assert troubles.report("q", {}, 3) == []
    assert troubles.text_of("a", 3) == "it hangs"
    assert troubles.text_of("a", STALE_S) == ""
    assert troubles.report("p", {"a": "it raises"}, 4) == ["a"]
    assert troubles.report("p", {"a": "it raises"}, TELL_AGAIN_S) == []
    assert troubles.report("p", {"a": "it raises"}, TELL_AGAIN_S + 4) == ["a"]
    troubles.forget("a")
    assert troubles.text_of("a", TELL_AGAIN_S + 4) == ""


def test_a_trouble_from_before_the_clock_was_set_back_is_over() -> None:
    troubles = RouterTroubles()
    troubles.report("p", {"a": "it hangs"}, 2 * TELL_AGAIN_S)
    assert troubles.text_of("a", 0) == ""
    assert troubles.report("q", {"a": "it hangs"}, 0) == ["a"]
    assert troubles.text_of("a", 0) == "it hangs"


def test_processes_that_have_ended_leave_their_places_to_others() -> None:
    troubles = RouterTroubles()
    for number in range(MAX_ROUTERS):
        troubles.report(f"p{number}", {"a": "it hangs"}, 0)
    troubles.report("q", {"a": "it hangs"}, STALE_S)
    assert troubles.text_of("a", STALE_S) == "it hangs"


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
