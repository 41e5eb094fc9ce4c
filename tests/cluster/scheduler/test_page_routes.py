"""The page on the scheduler's HTTP server, over a socket; its controller changes, fails and ends."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

import pytest
from test_api_routes import Site, instance
from tornado.httpclient import HTTPRequest

from daskserve.cluster.scheduler.http import page as page_package
from daskserve.cluster.scheduler.http.page import feed as feed_module
from daskserve.cluster.scheduler.http.page import handlers
from daskserve.cluster.scheduler.http.page.handlers import Page
from daskserve.errors import NotFoundError, UnavailableError

#: All files that a browser loads.
MAX_BYTES = 120_000


class PageSite(Site):
    """A scheduler's HTTP server with the page; a test sets the answers of its controllers."""

    def __init__(self, prefix: str = "") -> None:
        super().__init__(prefix)
        self.tasks: list[asyncio.Task[Any]] = []
        scheduler = self.api.routes._scheduler
        self.page = Page(scheduler, self.instances, self.api.access, self.api.feeds, self.guard, self._spawn)
        self.number = 0
        self.parts: dict[str, str] = {"instance": "{}"}
        self.error: Exception | None = None
        self.live: dict[str, Any] | None = None
        self.changed = asyncio.Event()
        self.hosts.answer = self._answer

    def _spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        self.tasks.append(asyncio.ensure_future(coroutine))
        return self.tasks[-1]

    async def _answer(self, incarnation: int) -> Any:
        if self.hosts.verbs[-1] == "live_metrics":
            if self.live is None:
                raise UnavailableError("not yet")
            return self.live
        message = self.hosts.calls[-1][2]
        if self.error is None and message["after"] == self.number:
            await self.changed.wait()
        if self.error is not None:
            await asyncio.sleep(0.01)
            raise self.error
        return {"number": self.number, "is_all": True, "parts": self.parts, "events": [], "next": 0}

    def change(self, **parts: str) -> None:
        self.parts = parts
        self.number += 1
        self.wake()

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[PageSite]:
        async with super().open():
            self.page.install()
            try:
                yield self
            finally:
                self.page.uninstall()
                await asyncio.gather(*self.tasks, return_exceptions=True)

    @asynccontextmanager
    async def stream(self, name: str = "one") -> AsyncIterator[asyncio.Queue[tuple[str, Any]]]:
        """Yield the events of a stream as kind and data, without pings; at its end, ``("", status)``."""
        found: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        text = b""

        def read(chunk: bytes) -> None:
            nonlocal text
            *whole, text = (text + chunk).split(b"\n\n")
            for each in whole:
                kind, data = re.fullmatch(rb"event: (\w+)\ndata: (.*)", each).groups()  # type: ignore[union-attr]
                if kind != b"ping":
                    found.put_nowait((kind.decode(), json.loads(data)))

        url = f"http://127.0.0.1:{self.port}{self.prefix}/daskserve/{name}/stream"
        request = HTTPRequest(url, streaming_callback=read, request_timeout=60)
        reading = asyncio.ensure_future(self.client.fetch(request, raise_error=False))
        reading.add_done_callback(lambda each: each.cancelled() or found.put_nowait(("", each.result().code)))
        try:
            yield found
        finally:
            reading.cancel()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "PAUSE_S", 0.0)
    monkeypatch.setattr(feed_module, "RETRY_S", 0.01)


async def next_parts(queue: asyncio.Queue[tuple[str, Any]]) -> Any:
    async with asyncio.timeout(5):
        kind, data = await queue.get()
    assert kind == "parts", (kind, data)
    return data


async def test_the_page_has_a_strict_policy_and_nothing_inline() -> None:
    async with PageSite("/prefix").open() as site:
        for path, base in (("/daskserve", "daskserve/"), ("/daskserve/", "")):
            reply = await site.ask(path)
            text = reply.body.decode()
            assert reply.code == 200
            assert f'src="{base}script.js"' in text
            assert f'href="{base}style.css"' in text
            assert not re.search(r"<style|\sstyle=|\son\w+=|<script>|https?://", text)
        rules = dict(each.split(" ", 1) for each in reply.headers["Content-Security-Policy"].split("; "))
        assert rules["default-src"] == "'none'"
        assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
        assert rules["require-trusted-types-for"] == "'script'"
        assert "unsafe" not in reply.headers["Content-Security-Policy"]
        kinds = {"script.js": "text/javascript", "style.css": "text/css", "icon.svg": "image/svg+xml"}
        for name, kind in kinds.items():
            reply = await site.ask(f"/daskserve/{name}")
            assert reply.headers["Content-Type"].partition(";")[0] == kind
            again = await site.ask(f"/daskserve/{name}", If_None_Match=reply.headers["Etag"])
            assert again.code == 304
        for wrong in ("index.html", "../feed.py", "feed.py", "x/y"):
            assert (await site.ask(f"/daskserve/{wrong}")).code == 404
        assert (await site.ask("/daskserve", Origin="http://evil.example")).code == 403
        assert (await site.ask("/daskserve/one/stream", Host="evil.example")).code == 403


def test_the_page_is_small_and_puts_no_text_into_markup() -> None:
    found = [each for each in files(page_package).iterdir() if not each.name.endswith((".py", "__"))]
    assert sum(len(each.read_bytes()) for each in found) < MAX_BYTES
    script = (files(page_package) / "script.js").read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|new Function", script)


async def test_a_stream_has_all_parts_and_then_those_that_change() -> None:
    async with PageSite().open() as site:
        site.change(instance="{}", shop='{"a": 1}')
        async with site.stream() as first:
            found = await next_parts(first)
            assert found == {
                "is_all": True,
                "parts": {"controller": {"is_online": True, "message": ""}, "instance": {}, "shop": {"a": 1}},
            }
            site.change(instance="{}", shop='{"a": 2}')
            assert await next_parts(first) == {"is_all": False, "parts": {"shop": {"a": 2}}}
            async with site.stream() as second:
                assert (await next_parts(second))["parts"]["shop"] == {"a": 2}
                assert len(site.tasks) == 1  # both read the same feed
            site.change(instance="{}")
            gone = await next_parts(first)
            assert gone["is_all"]
            assert gone["parts"].keys() == {"controller", "instance"}


async def test_a_stream_reports_that_the_controller_is_away_and_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with PageSite().open() as site:
        site.change(instance="{}")
        async with site.stream() as queue:
            await next_parts(queue)
            monkeypatch.setattr(feed_module, "LATE_S", 0.0)
            monkeypatch.setattr(feed_module, "WAIT_S", 0.05)
            site.error = UnavailableError("it is being replaced")
            site.wake()
            away = {"controller": {"is_online": False, "message": "The controller does not answer."}}
            assert (await next_parts(queue))["parts"] == away
            monkeypatch.setattr(feed_module, "LATE_S", 5.0)
            site.error = None
            site.number += 1
            assert (await next_parts(queue))["parts"] == {"controller": {"is_online": True, "message": ""}}
            site.error = NotFoundError("it does not run")
            site.wake()
            async with asyncio.timeout(5):
                assert await queue.get() == ("ended", {})
                assert await queue.get() == ("", 200)


async def test_only_instances_that_run_have_streams_and_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    async with PageSite().open() as site:
        found = json.loads((await site.ask("/daskserve/instances")).body)
        assert (found["instances"], found["common"]) == (["one", "two words"], None)
        assert not found["is_full"]
        assert (await site.ask("/daskserve/three/stream")).code == 404
        site.change(instance="{}")
        async with site.stream("two%20words") as queue:
            await next_parts(queue)
            monkeypatch.setattr(handlers, "MAX_STREAMS", 1)
            assert (await site.ask("/daskserve/one/stream")).code == 503
            assert json.loads((await site.ask("/daskserve/instances")).body)["is_full"]


async def test_a_stream_ends_with_its_instance_even_if_another_one_has_its_name_at_once() -> None:
    async with PageSite().open() as site:
        site.change(instance="{}")
        async with site.stream() as queue:
            await next_parts(queue)
            site.instances["one"] = instance("one")
            site.change(instance='{"epoch": 1}')
            async with asyncio.timeout(5):
                while (found := await queue.get())[0] == "parts":
                    pass  # of the answer that was awaited
            assert found == ("ended", {})


async def test_an_unexpected_error_ends_the_streams_so_that_pages_reconnect() -> None:
    async with PageSite().open() as site:
        site.error = KeyError("number")
        async with site.stream() as queue, asyncio.timeout(5):
            assert await queue.get() == ("ended", {})


async def test_a_page_and_the_stream_of_live_metrics_ask_the_controller_once() -> None:
    async with PageSite().open() as site:
        site.live = {"deployments": {"shop/Front": {"ongoing": 2}}, "replicas": {}, "http": {}, "calls": []}
        site.change(instance="{}")
        async with site.stream() as queue:
            found: dict[str, Any] = {}
            while "live/shop/Front" not in found:
                found |= (await next_parts(queue))["parts"]
            assert found["live/shop/Front"] == {"ongoing": 2, "by_replica": {}}
            asked = site.hosts.verbs.count("live_metrics")
            async with site.api.feeds.watch("one") as feed:
                await feed.after(0)
                assert await site.api.feeds.ask("one") is feed.found is site.live
            assert site.hosts.verbs.count("live_metrics") == asked == 1
