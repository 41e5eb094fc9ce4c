"""The routes of the REST API, over a socket, with controllers that answer, fail and hang."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import dask.config
import pytest
from distributed.http.routing import RoutingApplication
from tornado.httpclient import AsyncHTTPClient, HTTPResponse
from tornado.httpserver import HTTPServer
from tornado.simple_httpclient import SimpleAsyncHTTPClient
from tornado.testing import bind_unused_port
from tornado.web import RequestHandler

from daskserve.cluster.scheduler.controllers import Instance
from daskserve.cluster.scheduler.http.api import access, handler, live
from daskserve.cluster.scheduler.http.api.access import ControllerAccess
from daskserve.cluster.scheduler.http.api.handler import Api
from daskserve.cluster.scheduler.http.api.operations import (
    LIVE_WAIT_S,
    MAX_CONFIG_BYTES,
    OPERATIONS,
    SMALL_BYTES,
)
from daskserve.cluster.scheduler.http.site_guard import SiteGuard
from daskserve.cluster.store.errors import StoreUnavailableError
from daskserve.common.types import ActorAddress
from daskserve.errors import (
    ActorLostError,
    ExternalScalerDisabledError,
    NotFoundError,
    StaleEpochError,
    UnavailableError,
)

ReplicaRequest = Callable[[int], Awaitable[Any]]
GOOD = json.dumps({"target_num_replicas": 3}).encode()
#: Bodies by kind.
BODIES = {"number": GOOD, "model": b'{"version": "1"}'}
PROFILE = {
    **{"replica": "shop/d#abc", "worker": "w", "pid": 1, "seconds": 1.0, "interval_s": 0.01, "overhead": 0.0},
    **{"functions": [["f", "a.py", 1]], "stacks": [[[0], 1, 1]], "lines": [], "ticks": 1, "busy": 1},
    **{"idle": 0, "dropped": 0},
}
MEMORY = {
    **{name: PROFILE[name] for name in ("replica", "worker", "pid", "seconds")},
    "memory": {
        "was_on": True,
        "was_ended": False,
        "lines": [["/app/model.py", 7, 4096, 2, 1024]],
        "traced_bytes": 4096,
        "peak_bytes": 8192,
    },
}


class Hosts:
    """Fake Hosts; the test sets the answer of each controller by its incarnation."""

    def __init__(self) -> None:
        self.verbs: list[str] = []
        self.calls: list[tuple[str, int, Mapping[str, Any]]] = []
        self.answer: ReplicaRequest = self.echo_number

    async def echo_number(self, incarnation: int) -> Any:
        return self.calls[-1][2]["number"]

    async def call(self, address: ActorAddress, verb: str, **message: Any) -> Any:
        message.pop("request_id", None)
        self.verbs.append(verb)
        self.calls.append((address.name, address.incarnation, message))
        return await self.answer(address.incarnation)


def instance(name: str, incarnation: int | None = 1) -> Instance:
    entry = Instance(name, None, False, 5.0, b"", SimpleNamespace())  # type: ignore[arg-type]
    if incarnation is not None:
        place(entry, incarnation)
    return entry


def place(entry: Instance, incarnation: int) -> None:
    entry.controller = ActorAddress(f"{entry.name}/controller", "w1", incarnation)
    entry.controller_up.set()


class Site:
    """A scheduler's HTTP server with the route, and a client."""

    def __init__(self, prefix: str = "") -> None:
        self.application = RoutingApplication([(f"{prefix}/metrics", RequestHandler)])
        self.hosts = Hosts()
        self.instances = {"one": instance("one"), "two words": instance("two words")}
        scheduler: Any = SimpleNamespace(http_application=self.application, address="tcp://10.0.0.1:8786")
        self.guard = SiteGuard(scheduler)
        called = ControllerAccess(self.instances, self.hosts)  # type: ignore[arg-type]
        self.api = Api(scheduler, called, self.guard)
        self.prefix = prefix

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Site]:
        server = HTTPServer(self.application)
        sock, self.port = bind_unused_port()
        server.add_socket(sock)
        self.client: AsyncHTTPClient = SimpleAsyncHTTPClient(force_instance=True)
        self.api.routes.install()
        self.api.routes.install()
        try:
            yield self
        finally:
            self.client.close()
            server.stop()
            await server.close_all_connections()

    async def send(
        self, body: bytes | None = GOOD, path: str = "one/default/b", method: str = "POST", **headers: str
    ) -> HTTPResponse:
        name, application, deployment = path.split("/")
        below = f"api/v1/applications/{application}/deployments/{deployment}/scale"
        return await self.ask(f"/daskserve/{name}/{below}", method, body, **headers)

    async def ask(
        self, path: str, method: str = "GET", body: bytes | None = None, **headers: str
    ) -> HTTPResponse:
        named = {name.replace("_", "-"): each for name, each in headers.items()}
        return await self.client.fetch(
            f"http://127.0.0.1:{self.port}{self.prefix}{path}",
            method=method,
            body=body,
            headers=named,
            raise_error=False,
            request_timeout=5,
            allow_nonstandard_methods=True,
        )


@pytest.fixture
def prefix() -> str:
    return ""


@pytest.fixture
def site(prefix: str) -> AbstractAsyncContextManager[Site]:
    return Site(prefix).open()


def message_of(reply: HTTPResponse) -> str:
    assert reply.headers["Content-Type"] == "application/json"
    message: str = json.loads(reply.body)["message"]
    return message


@pytest.mark.parametrize("prefix", ["", "/dask"])
async def test_a_number_is_sent_to_the_controller_of_the_named_instance(prefix: str, site: Site) -> None:
    reply = await site.send()
    assert (reply.code, json.loads(reply.body)["target_num_replicas"]) == (200, 3)
    assert (await site.send(path="two%20words/sh%C3%B6p/b%C3%BC")).code == 200
    assert site.hosts.calls == [
        ("one/controller", 1, {"application": "default", "name": "b", "number": 3}),
        ("two words/controller", 1, {"application": "shöp", "name": "bü", "number": 3}),
    ]


async def test_each_kind_of_refusal_has_its_status(site: Site) -> None:
    reply = await site.send(path="three/default/b")
    assert (reply.code, message_of(reply)) == (
        404,
        "Instance 'three' does not run on this cluster; running: one, two words.",
    )
    site.instances["two words"].is_ending = True
    assert (await site.send(path="two%20words/default/b")).code == 404
    reply = await site.send(b"three")
    assert (reply.code, "not JSON" in message_of(reply)) == (400, True)
    reply = await site.send(None, method="GET")
    assert (reply.code, reply.headers["Allow"], message_of(reply)) == (405, "POST", "Method Not Allowed")
    assert (await site.send(method="PUT")).code == 405
    assert site.hosts.calls == []
    for error, status in (
        (NotFoundError("no such backend"), 404),
        (ExternalScalerDisabledError("not enabled"), 412),
        (StoreUnavailableError("the store is away"), 503),
    ):

        async def fail(_: int, error: Exception = error) -> None:
            raise error

        site.hosts.answer = fail
        reply = await site.send()
        assert (reply.code, message_of(reply)) == (status, str(error))
        assert json.loads(reply.body)["error"] == str(error)
        assert ("Retry-After" in reply.headers) == (status == 503)
    assert len(site.hosts.calls) == 3


async def test_a_body_that_is_too_large_is_refused(site: Site) -> None:
    fitting = GOOD + b" " * (SMALL_BYTES - len(GOOD))
    assert (await site.send(fitting)).code == 200
    for body in (fitting + b" ", b" " * (10 << 20)):
        reply = await site.send(body)
        assert (reply.code, message_of(reply)) == (413, "the body has more than 4096 bytes")
    assert len(site.hosts.calls) == 1
    assert site.guard.refusals["body"] == 2


async def test_a_cross_site_request_is_refused(site: Site) -> None:
    for origin in ("http://evil.example", "null", f"http://127.0.0.1:{site.port + 1}"):
        assert (await site.send(Origin=origin)).code == 403
    reply = await site.send(**{"Sec-Fetch-Site": "cross-site"})
    assert reply.code == 403
    assert message_of(reply).startswith("Requests of pages of other sites are refused")
    reply = await site.send(Host=f"evil.example:{site.port}", Origin=f"http://evil.example:{site.port}")
    assert (reply.code, "'evil.example' may be a name" in message_of(reply)) == (403, True)
    assert reply.headers["X-Content-Type-Options"] == "nosniff"
    assert site.hosts.calls == []
    assert site.guard.refusals == {"site": 4, "host": 1, "body": 0}
    own = {"Origin": f"http://127.0.0.1:{site.port}", "Sec-Fetch-Site": "same-origin"}
    assert (await site.send(**own)).code == 200


@pytest.mark.parametrize("error", [ActorLostError("gone"), StaleEpochError("replaced")])
async def test_a_lost_controller_is_replaced_and_the_call_retried(error: Exception, site: Site) -> None:
    entry = site.instances["one"]

    async def lose(incarnation: int) -> Any:
        if incarnation == 1:
            entry.controller = None
            entry.controller_up.clear()
            asyncio.get_running_loop().call_later(0.05, place, entry, 2)
            raise error
        return 3

    site.hosts.answer = lose
    assert (await site.send()).code == 200
    assert [incarnation for _, incarnation, _ in site.hosts.calls] == [1, 2]


async def test_a_call_to_a_hanging_controller_is_cancelled_once_it_is_replaced(
    monkeypatch: pytest.MonkeyPatch, site: Site
) -> None:
    monkeypatch.setattr(access, "CHECK_S", 0.01)
    was_cancelled = asyncio.Event()

    async def hang(incarnation: int) -> Any:
        if incarnation == 2:
            return 3
        place(site.instances["one"], 2)
        try:
            await asyncio.Event().wait()
        finally:
            was_cancelled.set()

    site.hosts.answer = hang
    assert (await site.send()).code == 200
    assert was_cancelled.is_set()


async def test_no_controller_in_time_gives_503(monkeypatch: pytest.MonkeyPatch, site: Site) -> None:
    monkeypatch.setattr(access, "PATIENCE_S", 0.1)
    site.instances["one"] = instance("one", None)
    reply = await site.send()
    assert (reply.code, reply.headers["Retry-After"]) == (503, "1")
    assert message_of(reply) == "No controller of 'one' answered within 0.1 s; retry later."
    site.instances["one"] = instance("one")

    async def hang(_: int) -> None:
        await asyncio.Event().wait()

    site.hosts.answer = hang
    assert (await site.send()).code == 503


async def test_an_instance_that_ends_during_the_request_gives_404(
    monkeypatch: pytest.MonkeyPatch, site: Site
) -> None:
    monkeypatch.setattr(access, "CHECK_S", 0.01)
    entry = site.instances["one"]

    async def end(_: int) -> None:
        entry.is_ending = True
        await asyncio.Event().wait()

    site.hosts.answer = end
    reply = await site.send()
    assert (reply.code, message_of(reply)) == (404, "Instance 'one' was shut down during the request.")


async def test_the_route_is_removed(site: Site) -> None:
    rules = site.application.default_router.rules
    count = len(rules)
    site.api.routes.uninstall()
    site.api.routes.uninstall()
    assert len(rules) < count
    assert (await site.send()).code == 404


class Answers:
    """Answers each verb with a fixed value."""

    def __init__(self, site: Site, **values: Any) -> None:
        self._site = site
        self._values = values
        site.hosts.answer = self

    async def __call__(self, incarnation: int) -> Any:
        return self._values[self._site.hosts.verbs[-1]]


async def test_without_a_name_the_common_instance_is_meant(site: Site) -> None:
    Answers(site, details={"version": 3, "details": {"applications": {}}})
    reply = await site.ask("/api/serve/applications/")
    assert (reply.code, "Several run; name one" in message_of(reply)) == (404, True)
    site.instances["daskserve"] = instance("daskserve")
    for path in (
        "/api/serve/applications/",
        "/api/serve/applications",
        "/daskserve/one/api/serve/applications/",
    ):
        reply = await site.ask(f"{path}?api_type=declarative")
        assert (reply.code, json.loads(reply.body), reply.headers["ETag"]) == (
            200,
            {"applications": {}},
            '"3"',
        )
    assert [name for name, _, _ in site.hosts.calls] == [
        "daskserve/controller",
        "daskserve/controller",
        "one/controller",
    ]
    assert site.hosts.calls[0][2] == {"api_type": "declarative"}


async def test_a_configuration_is_put_as_text_with_the_version_that_it_is_based_on(site: Site) -> None:
    Answers(site, apply_text={"version": 4, "deleted": [], "warnings": []}, plan_text={"version": 3})
    path = "/daskserve/one/api/serve/applications/"
    headers = {"If_Match": '"3"', "Content_Type": "application/json; charset=utf-8", "User_Agent": "tool"}
    reply = await site.ask(f"{path}?merge=true&version=abc", "PUT", b"{}", **headers)
    assert (reply.code, reply.headers["ETag"]) == (200, '"4"')
    assert site.hosts.calls[-1][2] == {
        "text": "{}",
        "name": "body.json",
        "merge": True,
        "expected_version": 3,
        "by": "tool at 127.0.0.1",
        "version": "abc",
    }
    assert (await site.ask(f"{path}?dry_run=true", "PUT", b"a: 1")).code == 200
    assert site.hosts.verbs[-1] == "plan_text"
    assert site.hosts.calls[-1][2] == {"text": "a: 1", "name": "body.yaml", "merge": False}
    for query, given, body, status, text in (
        ("", {"If_Match": "three"}, b"{}", 400, "must be the ETag"),
        ("?merge=perhaps", {}, b"{}", 400, "merge='perhaps' must be true or false"),
        ("?mrge=true", {}, b"{}", 400, "This request has no parameter 'mrge'; it has: merge, dry_run"),
        ("", {}, b"\xff", 400, "not UTF-8"),
        ("", {}, b" " * (MAX_CONFIG_BYTES + 1), 413, f"more than {MAX_CONFIG_BYTES} bytes"),
    ):
        reply = await site.ask(f"{path}{query}", "PUT", body, **given)
        assert (reply.code, text in message_of(reply)) == (status, True)


async def test_each_operation_answers_and_refuses_pages_of_other_sites(site: Site) -> None:
    changed = {"goal": "g", "version": 1}
    Answers(
        site,
        details={"version": 1, "details": {"applications": {"shop": {"name": "shop"}}}},
        apply_text=changed,
        plan_text=changed,
        get_config=changed,
        delete_applications=changed,
        delete_application=changed,
        history={},
        rollback=changed,
        restart=changed,
        **dict.fromkeys(
            ("explain", "rollout_status", "pause_rollout", "promote_rollout", "abort_rollout"), changed
        ),
        **dict.fromkeys(("list_models", "load_model", "unload_model", "set_default_model")),
        scale=3,
        config_schema={},
        profile=PROFILE,
        stacks={},
        events={"events": [], "next": 0},
        live_metrics={},
        logs={"records": [], "next": ""},
    )
    for each in OPERATIONS:
        path = each.path.replace("{application}", "shop").replace("{deployment}", "d").replace("{model}", "m")
        path = path.replace("{replica}", "shop%2Fd%23abc")
        body = None if each.method in ("GET", "DELETE") else BODIES.get(each.body, b"{}")
        assert (await site.ask(f"/daskserve/one{path}", each.method, body)).code == 200, each.path
        reply = await site.ask(f"/daskserve/one{path}", each.method, body, Origin="http://evil.example")
        assert reply.code == 403
    assert (await site.ask("/daskserve/one/api/serve/events", "PATCH", b"")).code == 405


async def test_a_profile_is_json_or_a_document_without_foreign_scripts(site: Site) -> None:
    Answers(site, profile=PROFILE)
    path = "/daskserve/one/api/serve/replicas/shop%2Fd%23abc/profile"
    assert json.loads((await site.ask(f"{path}?seconds=0.5")).body) == PROFILE
    assert site.hosts.calls[-1][2] == {"replica": "shop/d#abc", "seconds": 0.5, "memory": False}
    for kind, content_type in (("svg", "image/svg+xml"), ("html", "text/html"), ("text", "text/plain")):
        reply = await site.ask(f"{path}?format={kind}")
        assert reply.headers["Content-Type"] == f"{content_type}; charset=utf-8"
        assert reply.headers["Content-Security-Policy"].startswith("default-src 'none'")
    Answers(site, profile=MEMORY)
    assert b"Lines that hold memory" in (await site.ask(f"{path}?memory=true&format=text")).body
    assert site.hosts.calls[-1][2]["memory"] is True
    for wrong in (
        *("seconds=x", "seconds=-1", "seconds=1e9", "format=pdf", "memory=x"),
        "memory=true&format=svg",
    ):
        assert (await site.ask(f"{path}?{wrong}")).code == 400, wrong


async def test_changes_can_be_switched_off_but_for_scaling(site: Site) -> None:
    Answers(site, scale=3, get_config={"version": 1})
    with dask.config.set({"daskserve.scheduler.http-changes": False}):
        for each in OPERATIONS:
            if each.method == "GET" or each.path.endswith("/scale"):
                continue
            path = each.path.replace("{application}", "shop").replace("{deployment}", "d")
            body = None if each.method == "DELETE" else b"{}"
            reply = await site.ask(f"/daskserve/one{path.replace('{model}', 'm')}", each.method, body)
            assert (reply.code, "http-changes is false" in message_of(reply)) == (403, True), each.path
        assert (await site.ask("/daskserve/one/api/serve/config")).code == 200
        assert (await site.send()).code == 200


async def test_events_are_streamed_from_where_a_client_has_left_off(
    monkeypatch: pytest.MonkeyPatch, site: Site
) -> None:
    waits = [
        {"events": [{"number": 8, "kind": "deployed"}], "next": 8},
        UnavailableError("the controller is being replaced"),
        {"events": [{"number": 9, "kind": "scaled"}], "next": 9},
        NotFoundError("the instance has ended"),
    ]

    async def answer(_: int) -> Any:
        found = waits.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(handler, "RETRY_AFTER_S", 0)
    monkeypatch.setattr(access, "PATIENCE_S", 0.0)
    monkeypatch.setattr(handler, "SILENCE_S", 0.2)
    site.hosts.answer = answer
    monkeypatch.setattr(access, "PATIENCE_S", 0.2)
    stream = {"Accept": "text/event-stream", "Last_Event_ID": "7"}
    reply = await site.ask("/daskserve/one/api/serve/events?application=shop", **stream)
    assert reply.headers["Content-Type"] == "text/event-stream"
    assert site.hosts.calls[0][2] == {"after": 7, "application": "shop"}
    assert site.hosts.calls[-1][2]["after"] == 9
    text = reply.body.decode()
    assert 'id: 8\nevent: deployed\ndata: {"number": 8, "kind": "deployed"}\n\n' in text
    assert "id: 9\nevent: scaled" in text
    assert site.api.streams == 0
    site.hosts.calls.clear()
    waits[:] = [UnavailableError("ends here")]
    await site.ask("/daskserve/one/api/serve/logs?wait_s=20", Accept="text/event-stream")
    assert "wait_s" not in site.hosts.calls[0][2], "a stream begins before there is a record"
    monkeypatch.setattr(handler, "MAX_STREAMS", 0)
    assert (await site.ask("/daskserve/one/api/serve/events", **stream)).code == 503


async def test_a_stream_of_logs_waits_for_slow_workers_as_a_single_answer_does(
    monkeypatch: pytest.MonkeyPatch, site: Site
) -> None:
    answers: list[Any] = [{"records": [{"message": "late"}], "next": "c"}, NotFoundError("the end")]

    async def answer(_: int) -> Any:
        await asyncio.sleep(0.2)
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    site.hosts.answer = answer
    monkeypatch.setattr(access, "PATIENCE_S", 0.1)
    reply = await site.ask("/daskserve/one/api/serve/logs", Accept="text/event-stream")
    assert (reply.code, b'"late"' in reply.body) == (200, True)


async def test_the_document_names_every_operation_and_the_page_needs_no_other_site(site: Site) -> None:
    found = json.loads((await site.ask("/daskserve/openapi.json")).body)
    assert found["openapi"] == "3.1.0"
    named = {(path, method.upper()) for path, each in found["paths"].items() for method in each}
    assert named == {(each.path, each.method) for each in OPERATIONS}
    ids = [each["operationId"] for path in found["paths"].values() for each in path.values()]
    assert len(set(ids)) == len(ids)
    answers = [
        answer
        for path in found["paths"].values()
        for each in path.values()
        for answer in each["responses"].values()
    ]
    assert all(each["description"] and each["content"] for each in answers)
    page = await site.ask("/daskserve/api")
    assert page.headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert b"/api/serve/plan" in page.body
    assert b"://" not in page.body
    assert b"href='style.css'" in page.body
    assert b"href='../style.css'" in (await site.ask("/daskserve/api/")).body
    for text in (b"width=device-width", b"light dark", *(each.summary.encode() for each in OPERATIONS[:1])):
        assert text.replace(b"'", b"&#x27;") in page.body
    assert (await site.ask("/daskserve/api", Origin="http://evil.example")).code == 403


async def test_numbers_that_are_too_large_and_unknown_fields_are_refused(site: Site) -> None:
    del site.instances["two words"]
    digits, path = "9" * 31, "/api/serve/applications"
    assert (await site.ask(f"/api/serve/events?after={digits}")).code == 400
    assert (await site.ask(f"{path}/", "PUT", b"{}", **{"If-Match": f'"{digits}"'})).code == 400
    for body in (f'{{"revision": {digits}}}'.encode(), b'{"revison": 1}'):
        assert (await site.ask(f"{path}/shop/rollback", "POST", body)).code == 400
    assert site.hosts.verbs == []


async def test_models_are_loaded_and_unloaded(site: Site) -> None:
    Answers(site, list_models={}, load_model={"version": "2"}, unload_model=None, set_default_model=None)
    del site.instances["two words"]
    path = "/api/serve/applications/shop/deployments/m/models"
    assert (await site.ask(path)).code == 200
    reply = await site.ask(f"{path}/three/load", "POST", b'{"default": false}')
    assert (reply.code, json.loads(reply.body)) == (200, {"version": "2"})
    by = site.hosts.calls[-1][2]["by"]
    assert "127.0.0.1" in by
    message = {"name": "shop/m", "model": "three", "version": None, "by": by}
    assert site.hosts.calls[-1][2] == {**message, "is_default": False}
    assert (await site.ask(f"{path}/three/unload", "POST", b"")).code == 200
    assert site.hosts.calls[-1][2] == message
    assert (await site.ask(f"{path}/three/default", "POST", b'{"version": "1"}')).code == 200
    assert site.hosts.calls[-1][2] == {**message, "version": "1"}
    for verb, body in (("load", b'{"version": 2}'), ("load", b'{"default": 1}'), ("default", b"{}")):
        assert (await site.ask(f"{path}/three/{verb}", "POST", body)).code == 400


async def test_rollouts_are_steered(site: Site) -> None:
    async def state(_: int) -> Any:
        return {"state": "SERVING", "snapshot": [1, 2]}

    site.hosts.answer = state
    path = "/api/serve/applications/shop/deployments/m/rollout"
    del site.instances["two words"]
    named = {"name": "m", "application": "shop"}
    for verb, message in (("pause", {}), ("promote", {"full": False}), ("promote?full=true", {"full": True})):
        reply = await site.ask(f"{path}/{verb}", "POST")
        assert (reply.code, json.loads(reply.body)) == (200, {"state": "SERVING"})
        asked = site.hosts.calls[-1][2]
        assert asked == {**named, **message, "by": asked["by"]}
        assert "127.0.0.1" in asked["by"]
    assert (await site.ask(path)).code == 200
    assert (await site.ask(f"{path}/abort", "POST")).code == 200
    assert site.hosts.calls[-1][2].keys() == {*named, "by"}
    verbs = ["pause_rollout", "promote_rollout", "promote_rollout", "rollout_status", "abort_rollout"]
    assert site.hosts.verbs == verbs


async def test_ray_serves_client_finds_the_version_it_asks_for_first(site: Site) -> None:
    found = json.loads((await site.ask("/api/ray/version")).body)
    assert tuple(map(int, found["ray_version"].split("."))) >= (1, 12)


async def test_live_metrics_are_asked_for_once_for_all_who_watch(
    monkeypatch: pytest.MonkeyPatch, site: Site
) -> None:
    answers: list[Any] = [
        {"time": 1.0},
        UnavailableError("the controller is being replaced"),
        {"time": 2.0},
        NotFoundError("the instance has ended"),
    ]

    async def answer(_: int) -> Any:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(access, "PATIENCE_S", 0.05)
    monkeypatch.setattr(live, "PERIOD_S", 0.02)
    path = "/daskserve/one/api/serve/metrics/live"
    site.hosts.answer = answer
    assert (await site.ask(path)).body == b'{"time": 1.0}'
    assert site.hosts.calls[0][2] == {"wait_s": LIVE_WAIT_S}
    del site.hosts.verbs[:]
    stream = {"Accept": "text/event-stream"}
    answers.insert(0, {"time": 1.0})
    replies = await asyncio.gather(site.ask(path, **stream), site.ask(path, **stream))
    for each in replies:
        assert each.headers["Content-Type"] == "text/event-stream"
        assert [line for line in each.body.decode().splitlines() if line.startswith("data")] == [
            'data: {"time":1.0}',
            'data: {"time":2.0}',
        ]
    assert (answers, site.api.streams, site.api.feeds._feeds) == ([], 0, {})
    answers.append(NotFoundError("there is no such instance"))
    assert (await site.ask(path, **stream)).code == 404
