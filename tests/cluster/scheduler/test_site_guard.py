"""Which requests to the scheduler's HTTP server are refused."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import dask
from tornado.httputil import HTTPHeaders, HTTPServerRequest, RequestStartLine

from daskserve.cluster.scheduler.http.site_guard import SiteGuard

SCHEDULER: Any = SimpleNamespace(address="tls://Scheduler.Example.org:8786")
CONNECTION: Any = SimpleNamespace(context=None)


def refusal(guard: SiteGuard | None = None, **headers: str) -> str | None:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    line = RequestStartLine("POST", "/", "HTTP/1.1")
    request = HTTPServerRequest(start_line=line, headers=HTTPHeaders(named), connection=CONNECTION)
    return (guard or SiteGuard(SCHEDULER)).refusal(request)


def test_the_scheduler_is_named_by_its_addresses_and_private_names() -> None:
    for host in [
        "127.0.0.1:8787",
        "10.0.0.1",
        "[::1]:8787",
        "[fd00::4]",
        "localhost:8787",
        "LOCALHOST",
        "a.localhost",
        "scheduler:8787",
        "scheduler.",
        "dask-scheduler.ml.svc",
        "dask-scheduler.ml.svc.cluster.local:8787",
        "scheduler.example.org:8787",
        "Scheduler.EXAMPLE.org.",
        socket.gethostname(),
    ]:
        assert refusal(Host=host) is None, host


def test_other_names_are_refused_unless_they_are_listed() -> None:
    for host in [
        "evil.example",
        "evil.example:8787",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "scheduler.example.org.evil.example",
        "notlocal.com",
        "svc.dev",
        "dask-scheduler.dev",
    ]:
        guard = SiteGuard(SCHEDULER)
        text = refusal(guard, Host=host)
        assert text is not None, host
        assert "add it to daskserve.scheduler.allowed-hosts" in text, host
        assert guard.refusals == {"site": 0, "host": 1, "body": 0}, host
        name = host.partition(":")[0]
        for allowed in (name.upper(), [name, "x.y"]):
            with dask.config.set({"daskserve.scheduler.allowed-hosts": allowed}):
                assert refusal(Host=host) is None, host


def test_own_pages_and_the_user_are_answered() -> None:
    for site in ["same-origin", "same-site", "none"]:
        assert refusal(Host="scheduler:8787", Sec_Fetch_Site=site) is None, site
        assert refusal(Host="Scheduler:8787", Origin="http://scheduler:8787", Sec_Fetch_Site=site) is None, (
            site
        )


def test_pages_of_other_sites_are_refused() -> None:
    for headers in [
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "cross-site", "Origin": "http://scheduler:8787"},
        {"Origin": "http://evil.example"},
        {"Origin": "http://scheduler:8788"},
        {"Origin": "null"},
        {"Origin": "null", "Sec_Fetch_Site": "same-origin"},
        {"Origin": "http://["},
        # Through a reverse proxy, with a name that anyone may own, or from another origin.
        {"Origin": "https://evil.example", "Sec_Fetch_Site": "same-origin"},
        {"Origin": "https://front:8443", "Sec_Fetch_Site": "same-site"},
        {"Origin": ""},
    ]:
        guard = SiteGuard(SCHEDULER)
        text = refusal(guard, Host="scheduler:8787", **headers)
        assert text is not None, headers
        assert text.startswith("Requests of pages of other sites are refused; this one comes from"), headers
        assert guard.refusals == {"site": 1, "host": 0, "body": 0}, headers


def test_the_own_page_is_known_behind_a_reverse_proxy_that_changes_the_host() -> None:
    headers = {
        "Host": "scheduler:8787",
        "Origin": "https://dask.example.com",
        "Sec_Fetch_Site": "same-origin",
    }
    assert refusal(**headers) is not None
    with dask.config.set({"daskserve.scheduler.allowed-hosts": ["dask.example.com"]}):
        assert refusal(**headers) is None
    assert refusal(**{**headers, "Origin": "http://127.0.0.1:8888"}) is None
