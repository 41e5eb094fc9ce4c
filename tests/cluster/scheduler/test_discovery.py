"""The targets listed for Prometheus, and the route that serves the list."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from distributed.http.routing import RoutingApplication
from tornado.httpclient import AsyncHTTPClient
from tornado.httpserver import HTTPServer
from tornado.httputil import HTTPHeaders, HTTPServerRequest, RequestStartLine
from tornado.simple_httpclient import SimpleAsyncHTTPClient
from tornado.testing import bind_unused_port
from tornado.web import RequestHandler

from daskserve.cluster.scheduler.http.discovery import (
    Targets,
    metrics_path,
    one_per_process,
    reachable,
    target,
)
from daskserve.cluster.scheduler.http.site_guard import SiteGuard

CONNECTION: Any = SimpleNamespace(context=None)


class Scheduler:
    """The part of a Dask scheduler that is used."""

    def __init__(self, prefix: str = "") -> None:
        self.address = "tcp://10.0.0.1:8786"
        self.http_application = RoutingApplication([(f"{prefix}/metrics", RequestHandler)])
        self.http_server = SimpleNamespace(address="0.0.0.0", port=8787)
        self.workers: dict[str, Any] = {}

    def join(self, host: str, port: int | None) -> None:
        services = {} if port is None else {"dashboard": port}
        name = f"w{len(self.workers)}"
        self.workers[f"tcp://{host}:{port}"] = SimpleNamespace(host=host, services=services, name=name)


def made_targets(scheduler: Any, facts_of: Callable[[str], Mapping[str, Any]]) -> Targets:
    return Targets(scheduler, facts_of, SiteGuard(scheduler))


def listed(scheduler: Scheduler, facts: Mapping[str, Any] | None = None) -> list[str]:
    targets = made_targets(scheduler, lambda address: (facts or {}).get(address, {}))
    found = asyncio.run(targets.describe())
    return [f"{each['labels']['dask_role']} {each['targets'][0]}" for each in found]


def test_the_scheduler_and_all_workers_are_listed_as_they_come_and_go() -> None:
    scheduler = Scheduler()
    assert listed(scheduler) == ["scheduler 10.0.0.1:8787"]
    scheduler.join("10.0.0.2", 40001)
    scheduler.join("10.0.0.3", None)
    scheduler.join("fd00::4", 40004)
    assert listed(scheduler) == ["scheduler 10.0.0.1:8787", "worker 10.0.0.2:40001", "worker [fd00::4]:40004"]
    del scheduler.workers["tcp://10.0.0.2:40001"]
    assert listed(scheduler) == ["scheduler 10.0.0.1:8787", "worker [fd00::4]:40004"]


def test_one_worker_per_process_is_listed() -> None:
    scheduler = Scheduler()
    for port in (1, 2, 3):
        scheduler.join("10.0.0.2", port)
    facts = {f"tcp://10.0.0.2:{port}": {"pid": pid} for port, pid in ((1, 7), (2, 7), (3, 8))}
    assert listed(scheduler, facts)[1:] == ["worker 10.0.0.2:1", "worker 10.0.0.2:3"]


def test_workers_of_unknown_processes_are_all_listed() -> None:
    entry = target("h", 1, role="worker", name="w", path="/metrics")
    assert one_per_process([(None, entry), (None, entry), (1, entry), (1, entry)]) == [entry] * 3


def test_a_wildcard_address_is_replaced_by_the_host_that_dask_uses() -> None:
    for bound, expected in [
        ("", "h"),
        ("0.0.0.0", "h"),
        ("::", "h"),
        ("127.0.0.1", "127.0.0.1"),
        ("10.1.1.1", "10.1.1.1"),
    ]:
        assert reachable(bound, "h") == expected, bound


@pytest.mark.parametrize("prefix", ["", "/dask"])
def test_the_route_is_added_below_the_prefix_and_removed(prefix: str) -> None:
    scheduler = Scheduler(prefix)
    application = scheduler.http_application
    assert metrics_path(application) == f"{prefix}/metrics"
    rules = list(application.default_router.rules)
    targets = made_targets(scheduler, lambda _: {})

    def is_found() -> bool:
        line = RequestStartLine("GET", f"{prefix}/daskserve/targets", "HTTP/1.1")
        request = HTTPServerRequest(start_line=line, headers=HTTPHeaders(host="h"), connection=CONNECTION)
        return "TargetsHandler" in str(application.find_handler(request).handler_class)

    assert not is_found()
    targets.routes.install()
    targets.routes.install()
    assert is_found()
    targets.routes.uninstall()
    targets.routes.uninstall()
    assert not is_found()
    assert application.default_router.rules == rules


async def test_pages_of_other_sites_do_not_read_the_list() -> None:
    scheduler = Scheduler()
    made_targets(scheduler, lambda _: {}).routes.install()
    server = HTTPServer(scheduler.http_application)
    sock, port = bind_unused_port()
    server.add_socket(sock)
    client: AsyncHTTPClient = SimpleAsyncHTTPClient(force_instance=True)

    async def get(**headers: str) -> tuple[int, Any]:
        url = f"http://127.0.0.1:{port}/daskserve/targets"
        reply = await client.fetch(url, headers=headers, raise_error=False)
        assert reply.headers["Content-Type"] == "application/json"
        return reply.code, json.loads(reply.body)

    assert (await get())[1][0]["targets"] == ["10.0.0.1:8787"]
    for headers in ({"Host": "evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        code, body = await get(**headers)
        assert (code, list(body)) == (403, ["message"])
    client.close()
    server.stop()
    await server.close_all_connections()
