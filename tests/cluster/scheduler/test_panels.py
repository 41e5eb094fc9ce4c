"""The panels in Dask's dashboard."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest
from bokeh.document import Document
from distributed import Scheduler
from test_api_routes import Site
from tornado.httpclient import AsyncHTTPClient

from daskserve.cluster.scheduler.http.page.menu import add_to_menu, remove_from_menu
from daskserve.cluster.scheduler.http.panels import feed as feeds
from daskserve.cluster.scheduler.http.panels.documents import documents
from daskserve.cluster.scheduler.http.panels.feed import PanelFeed
from daskserve.cluster.scheduler.http.panels.install import Panels
from daskserve.cluster.scheduler.http.panels.series import MAX_LINES, OTHERS, Series, label
from daskserve.common.clock import LoopClock
from daskserve.errors import UnavailableError
from daskserve.testing import run_virtual, wait_until

COLOURS = ("red", "green", "blue")


def live(**requests_per_s: float) -> dict[str, Any]:
    """Return live metrics of some deployments. Each has a replica on a worker of the same name."""
    return {
        "deployments": {
            tag: {"requests_per_s": rate, "latency_p50_s": None, "ongoing": 1, "queued": None}
            for tag, rate in requests_per_s.items()
        },
        "replicas": {
            f"{tag}#{number}": {"deployment": tag, "worker": f"tcp://{tag}:1"}
            for tag in requests_per_s
            for number in range(2)
        },
    }


def test_lines_are_of_the_busiest_deployments_and_the_rest_adds_up() -> None:
    series = Series()
    rates = {f"d{number:02}": float(number) for number in range(20)}
    for second in (1.0, 2.0):
        series.add(second, {"one": live(**rates)})
    lines = series.lines("requests_per_s", adds_up=True)
    assert list(lines) == [*(f"d{number}" for number in range(11, 20)), OTHERS]
    assert len(lines) == MAX_LINES + 1
    assert lines["d19"] == ([1000.0, 2000.0], [19.0, 19.0])
    assert lines[OTHERS] == ([1000.0, 2000.0], [55.0, 55.0])
    assert OTHERS not in series.lines("requests_per_s", adds_up=False)
    assert set(series.replicas(COLOURS)["deployment"]) == set(lines)


def test_unknown_values_and_pauses_are_gaps() -> None:
    series = Series()
    series.add(1.0, {"one": live(a=1)})
    series.add(60.0, {"one": live(a=2)})
    xs, ys = series.lines("requests_per_s", adds_up=True)["a"]
    assert xs == [1000.0, 1001.0, 60000.0]
    assert [None if math.isnan(each) else each for each in ys] == [1.0, None, 2.0]
    assert all(map(math.isnan, series.lines("latency_p50_s", adds_up=False)["a"][1]))
    columns = series.columns([("requests_per_s", "solid"), ("queued", "dotted")], COLOURS, adds_up=True)
    assert (columns["name"], columns["last"]) == (["a", "a"], ["2", ""])
    assert columns["label"] == columns["name"]
    assert (label("a" * 28), label("a" * 29)) == ("a" * 28, "a" * 27 + "…")
    assert len({len(each) for each in columns.values()}) == 1


def test_several_instances_are_distinguished() -> None:
    series = Series()
    series.add(1.0, {"one": live(a=1), "two": live(a=2)})
    series.add(2.0, {"one": live(a=1), "two": None})  # it answered too late
    assert series.busiest() == ["one: a", "two: a"]


def test_controllers_are_polled_only_while_a_page_is_open() -> None:
    asked: list[str] = []

    async def ask(name: str) -> dict[str, Any]:
        asked.append(name)
        if name == "gone":
            raise UnavailableError("being replaced")
        if name == "hangs":
            await asyncio.Event().wait()
        return live(a=1)

    async def main() -> None:
        feed = PanelFeed(lambda: ("one", "gone", "hangs"), ask, LoopClock())
        await asyncio.sleep(10)
        assert asked == []
        feed.join()
        feed.join()
        await asyncio.sleep(5.5)
        assert asked.count("one") == 6
        feed.leave()
        feed.leave()
        await asyncio.sleep(10)
        assert asked.count("one") == 6
        assert feed.series.busiest() == ["one: a"]

    run_virtual(main)


async def test_a_document_is_filled_on_the_event_loop_from_any_thread() -> None:
    feed = PanelFeed(list, no_metrics, LoopClock())
    for fill in documents(feed, {}).values():
        await asyncio.to_thread(fill, document := Document())  # bokeh 3.10 calls it in a thread
        assert document.roots
        assert document.session_destroyed_callbacks
    feed.close()


async def no_metrics(name: str) -> dict[str, Any]:
    return live()


async def test_panels_come_to_a_dashboard_that_runs_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "PERIOD_S", 0.02)

    asked: list[str] = []

    async def ask(name: str) -> dict[str, Any]:
        asked.append(name)
        return live(**{"<b>shop</b>": 5.0})

    settings = {"port": 0, "dashboard": True, "dashboard_address": "127.0.0.1:0", "validate": False}
    async with Scheduler(host="127.0.0.1", **settings) as scheduler:
        client, port = AsyncHTTPClient(force_instance=True), scheduler.http_server.port

        async def get(path: str) -> tuple[int, str]:
            reply = await client.fetch(f"http://127.0.0.1:{port}/{path}", raise_error=False)
            return reply.code, reply.body.decode()

        async def plots() -> set[str]:
            found = json.loads((await get("individual-plots.json"))[1])
            return {path for path in found.values() if "daskserve" in path}

        panels = Panels(scheduler, lambda: ["daskserve"], ask)
        assert await plots() == set()
        panels.install()
        panels.install()
        ends = ("replicas", "requests", "in-flight", "latency", "queue")
        assert await plots() == {f"/individual-daskserve-{each}" for each in ends}
        assert 'href="daskserve-panels"' in (await get("status"))[1]
        add_to_menu(scheduler, "daskserve")
        add_to_menu(scheduler, "daskserve")
        assert (await get("status"))[1].count('href="daskserve"') == 1
        remove_from_menu(scheduler, "daskserve")
        assert 'href="daskserve"' not in (await get("status"))[1]
        for path in ("daskserve-panels", "individual-daskserve-replicas"):
            assert (await get(path))[0] == 200, path
        await wait_until(lambda: "<b>shop</b>" in panels._feed.series.busiest())
        assert "<b>shop" not in (await get("daskserve-panels"))[1]
        panels.uninstall()
        panels.uninstall()
        assert await plots() == set()
        assert 'href="daskserve-panels"' not in (await get("status"))[1]
        assert (await get("individual-daskserve-queue"))[0] == 404
        seen = len(asked)
        await asyncio.sleep(0.1)
        assert len(asked) == seen
        client.close()


async def test_a_scheduler_without_a_dashboard_says_why_it_has_no_panels() -> None:
    async def ask(name: str) -> dict[str, Any]:
        raise AssertionError

    async with Site("/prefix").open() as site:
        scheduler: Any = type("Plain", (), {"http_application": site.application})()
        panels = Panels(scheduler, list, ask)
        for _ in range(2):
            panels.install()
            reply = await site.ask("/daskserve-panels")
            assert (reply.code, "pip install" in json.loads(reply.body)["message"]) == (404, True)
            panels.uninstall()
        assert b"pip install" not in (await site.ask("/daskserve-panels")).body
    Panels(type("Plain", (), {})(), list, ask).install()  # type: ignore[arg-type]
