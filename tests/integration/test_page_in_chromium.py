"""The page in a real browser, with data of a real cluster and of a scripted stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chromium import HAS_CHROMIUM, Tab, chromium
from dask_processes import ExternalCluster
from scraping import dashboard
from tornado.web import Application, RequestHandler

import daskserve as serve
from daskserve.cluster.scheduler.controllers import Instance
from daskserve.cluster.scheduler.http.page.feed import Feed
from daskserve.cluster.scheduler.http.page.handlers import (
    InstancesHandler,
    PageHandler,
    Sources,
    StreamHandler,
)

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not HAS_CHROMIUM, reason="needs Debian's package chromium"),
]

#: A tag, a text in the other direction, and one that is long.
HOSTILE = (
    "<img src=x onerror=document.title='owned'>",
    "\u202etxt.exe\u202c שלום",
    "x" * 10_000,
    "'\"`${1}</script>",
)


class OpenGuard:
    """Accepts all requests."""

    def refusal(self, request: Any) -> None:
        return None


class ScriptedFeeds:
    """A feed whose parts a test sets."""

    readers = 0

    def __init__(self) -> None:
        #: Whether the scheduler answers a page's first request, and its requests about a replica.
        self.answers = asyncio.Event()
        self.answers.set()
        self.feed = Feed("one", None, None)  # type: ignore[arg-type]

    def enter(self, instance: str) -> Any:
        self.readers += 1
        return self.feed

    def leave(self, instance: str) -> None:
        self.readers -= 1

    def restart(self) -> None:
        """End the instance, and start another one of the same name."""
        ended, self.feed = self.feed, Feed("one", None, None)  # type: ignore[arg-type]
        ended.end()

    def set(self, **parts: Any) -> None:
        self.feed._set({name.replace("__", "/", 1): each for name, each in parts.items()})


class SlowInstances(InstancesHandler):
    async def get(self) -> None:
        await self._sources.feeds.answers.wait()  # type: ignore[attr-defined]
        await super().get()


class Posts(RequestHandler):
    """Answers requests to the REST API, and records them."""

    def initialize(self, notes: list[tuple[str, str, bytes]], feeds: ScriptedFeeds) -> None:
        self._notes = notes
        self._feeds = feeds

    def post(self, path: str) -> None:
        self._notes.append(("POST", path, self.request.body))
        if "refused" in path:
            self.set_status(400)
        self.write({"message": "It is autoscaled." if "refused" in path else "Done."})

    async def get(self, path: str) -> None:
        if path.endswith("/stacks"):
            await self._feeds.answers.wait()
            # As from a child process that holds its interpreter lock.
            native = {"note": "The process did not answer.", "native": "l1: in hold\n"}
            self.write({"threads": [], "tasks": [], "more_tasks": 0, **native})
        elif "profile" in path and "memory" in self.request.query:
            lines = [["/a/b/c/d.py", 7, 3 << 20, 12, 1024]]
            sizes = {"traced_bytes": 4 << 20, "peak_bytes": 5 << 20}
            self.write(
                {"seconds": 5.0, "memory": {"was_on": False, "was_ended": False, "lines": lines, **sizes}}
            )
        elif path.endswith("serve/logs"):
            self._notes.append(("GET", path, b""))
            if sum(each[1] == path for each in self._notes) == 2:
                self.set_status(503)
                self.write({"message": "No controller answers."})
                return
            row = {"time": time.time(), "level": "INFO", "message": f"line {len(self._notes)}"}
            self.write({"records": [row], "next": "x", "missing": {}})
        elif path.endswith("/explain"):
            sample = {"ago_s": 1.0, "ongoing": 5, "queued": 1, "rate": 7.0}
            asked = {"policy": "latency", "policy_wants": 3, "min_replicas": 1, "max_replicas": 4}
            self.write(
                {**asked, "running": 2, "wanted": 3, "reason": "busy", "samples": [sample], "events": []}
            )
        elif "profile" in path:
            functions = [["waits", "a.py", 1], ["works", "a.py", 9]]
            self.write({"functions": functions, "stacks": [[[0], 90, 0], [[1], 10, 10]]})
        elif "history" in path:
            revision = {
                "number": 1,
                "state": "SUPERSEDED",
                "at": time.time(),
                "by": HOSTILE[0],
                "changes": [],
                "reason": "",
                "can_return": True,
            }
            revisions = [revision, {**revision, "number": 2, "state": "RUNNING"}]
            if "changing" in path:
                revisions.append({**revision, "number": 3, "state": "DEPLOYING"})
            self.write({"current": 2, "revisions": revisions})
        else:
            self.set_status(404)


class Site:
    def __init__(self, url: str, feeds: ScriptedFeeds, tab: Tab, notes: list[tuple[str, str, bytes]]) -> None:
        self.url, self.feeds, self.tab, self.notes = url, feeds, tab, notes

    async def go(self, place: str) -> None:
        await self.tab.ask(f"location.hash = {json.dumps('#/one' + place)}")


def deployment(name: str, status: str = "HEALTHY", **more: Any) -> dict[str, Any]:
    replica = {
        "id": f"{name}#abc",
        "state": "RUNNING",
        "worker": "tcp://w",
        "worker_name": "0",
        "host": "h",
        "pid": 1,
        "since": time.time(),
        "is_old": False,
        "message": "",
    }
    known = {
        "tag": name,
        "status": status,
        "message": "",
        "replica_states": {"RUNNING": 1},
        "dead_replicas": [],
        "actor_of": "",
        "wanted": 1,
        "running": 1,
        "version": "",
        "deployed_at": time.time(),
        "needs": [],
        "max_ongoing": 100,
        "autoscaling": None,
        "replicas": [replica],
        "rollout": None,
        "is_ingress": True,
    }
    return {**known, **more}


def event(number: int, application: str) -> dict[str, Any]:
    known = {"at": time.time(), "kind": "DEPLOYED", "deployment": "", "subject": "", "message": "m", "by": ""}
    return {"number": number, "application": application, **known}


def application(name: str, **deployments: Any) -> dict[str, Any]:
    return {
        "name": name,
        "status": "RUNNING",
        "message": "",
        "route_prefix": "/",
        "last_deployed_time_s": time.time(),
        "deployments": deployments,
        "traffic": {},
    }


_METRICS = {
    "requests_per_s": 3.0,
    "errors_per_s": 0.0,
    "latency_p50_s": 1.2,
    "latency_p99_s": 2.5,
    "ongoing": 8,
    "queued": 2,
    "continuous": {"active": 6, "slots": 8, "queued": 2, "outputs_per_s": 310.0},
}
#: Live metrics of a deployment with a continuous batch.
LIVE = {**_METRICS, "replicas": 1, "by_replica": {"Front#abc": _METRICS}}
INSTANCE = {
    "instance": "one",
    "http_urls": ["http://127.0.0.1:8000"],
    "actors": [],
    "problems": {},
    "workers": 1,
    "epoch": 1,
    "owns_store": True,
}
ONLINE = {"is_online": True, "message": ""}


@asynccontextmanager
async def site() -> AsyncIterator[Site]:
    """Yield a page whose stream the test writes."""
    feeds, notes = ScriptedFeeds(), []
    arguments = {
        "guard": OpenGuard(),
        "sources": Sources({"one": Instance("one", None, False, 5.0, b"", SimpleNamespace())}, feeds),
    }  # type: ignore[arg-type]
    application = Application(
        [
            (r"/daskserve/?", PageHandler, arguments),
            (r"/daskserve/(?P<name>style\.css|script\.js|icon\.svg)", PageHandler, arguments),
            (r"/daskserve/instances", SlowInstances, arguments),
            (r"/daskserve/(?P<instance>[^/]+)/stream", StreamHandler, arguments),
            (r"/daskserve/one/(api/.*)", Posts, {"notes": notes, "feeds": feeds}),
        ]
    )
    server = application.listen(0, "127.0.0.1")
    port = next(iter(server._sockets.values())).getsockname()[1]
    try:
        async with chromium() as tab:
            await tab.resize(1280, 800)
            feeds.set(instance=INSTANCE, controller=ONLINE)
            url = f"http://127.0.0.1:{port}/daskserve"
            await tab.open(url)
            await tab.until("site.parts.size >= 2")
            yield Site(url, feeds, tab, notes)
            assert tab.troubles == []
    finally:
        server.stop()
        await server.close_all_connections()


async def test_names_of_users_are_never_markup() -> None:
    async with site() as page:
        for number, name in enumerate(HOSTILE):
            bad = deployment(
                name,
                "UNHEALTHY",
                tag=f"t{number}",
                message=name,
                dead_replicas=[
                    {"name": name, "reason": name, "at": 1.0, "user_traceback": name, "last_lines": [name]}
                ],
            )
            page.feeds.feed._set({f"app/{name}": application(name, **{name: bad})})
        tab = page.tab
        await tab.until(f"site.deployments.length === {len(HOSTILE)}")
        for place in ("", "/graph", "/events", "/system"):
            await page.go(place)
            await tab.until("document.querySelector('main h1')")
        for name in HOSTILE:
            await tab.ask(f"location.hash = to('app', {json.dumps(name)}, {json.dumps(name)})")
            await tab.until(f"document.querySelector('main h1').textContent === {json.dumps(name)}")
            await tab.ask(f"location.hash = to('app', {json.dumps(name)})")
            await tab.until("document.querySelector('main h1') && document.querySelector('.acts')")
        assert await tab.ask("document.images.length") == 1  # that of the page itself
        assert await tab.ask("document.title") != "owned"
        # A long name makes no page wider than the window.
        assert await tab.ask("document.documentElement.scrollWidth <= innerWidth")


async def test_a_thousand_deployments_are_searched_sorted_and_scrolled() -> None:
    async with site() as page:
        tab = page.tab
        parts = {
            f"app/a{number:03}": application(
                f"a{number:03}", model=deployment("model", tag=f"a{number:03}/model")
            )
            for number in range(1000)
        }
        parts |= {
            f"live/a{number:03}/model": {
                "requests_per_s": float(number),
                "errors_per_s": 0.0,
                "latency_p50_s": 0.01,
                "latency_p99_s": 0.02,
                "ongoing": 1,
                "queued": 0,
                "replicas": 1,
                "by_replica": {},
            }
            for number in range(1000)
        }
        page.feeds.feed._set(parts)
        await tab.until("site.deployments.length === 1000")
        await tab.until("document.querySelectorAll('.rows .row').length > 3")
        assert await tab.ask("document.querySelectorAll('.rows .row').length") < 60
        assert await tab.ask("document.querySelector('.grid').getAttribute('aria-rowcount')") == "1001"
        took_ms = await tab.ask(
            "(() => { const began = performance.now(); for (let at = 0; at < 10; at++) draw(); "
            "return (performance.now() - began) / 10; })()"
        )
        assert took_ms < 150, took_ms
        await tab.ask(
            "[...document.querySelectorAll('.headrow button')]"
            ".find((each) => each.textContent.startsWith('Requests')).click()"
        )
        await tab.until("document.querySelector('.rows .row a').getAttribute('href').includes('a999')")
        await tab.ask("scrollTo(0, document.documentElement.scrollHeight)")
        await tab.until(
            "[...document.querySelectorAll('.rows .row a')].some((each) => each.href.includes('a000'))"
        )
        await tab.ask(
            "scrollTo(0, 0); $('search').value = 'a12'; $('search').oninput({ target: $('search') })"
        )
        await tab.until("document.querySelector('.grid').getAttribute('aria-rowcount') === '11'")
        # With keys: from the first row to the last one.
        await tab.ask("document.querySelector('.rows .row a').focus()")
        await tab.press("End")
        assert "a120" in await tab.until("document.activeElement.getAttribute('href')")


async def test_changes_are_shown_at_once_and_a_lost_controller_turns_the_page_grey() -> None:
    async with site() as page:
        tab = page.tab
        page.feeds.set(app__shop=application("shop", Front=deployment("Front")))
        await tab.until("document.querySelector('.rows .chip.good')")
        began = time.monotonic()
        page.feeds.set(
            app__shop=application("shop", Front=deployment("Front", "UNHEALTHY", message="no room"))
        )
        await tab.until(
            "document.querySelector('.rows .chip.bad') && document.body.innerText.includes('no room')"
        )
        assert time.monotonic() - began < 1.0
        assert await tab.ask("document.title.startsWith('(1)')")
        assert await tab.until("$('spoken').textContent.includes('Front is unhealthy')")
        page.feeds.set(controller={"is_online": False, "message": "The controller does not answer."})
        await tab.until(
            "$('main').classList.contains('stale') && $('banner').textContent.includes('does not answer')"
        )
        assert await tab.ask("document.querySelectorAll('.rows .row').length") == 1
        page.feeds.set(controller=ONLINE)
        await tab.until("!$('main').classList.contains('stale') && $('banner').textContent === ''")


async def test_a_graph_has_rates_and_a_number_of_replicas_its_reasons() -> None:
    async with site() as page:
        tab = page.tab
        shop = {
            "Front": deployment("Front", needs=["Back"]),
            "Back": deployment("Back", is_ingress=False),
            "Broken": deployment("Broken", "DEPLOY_FAILED", is_ingress=False),
        }
        calls = [
            {"from": "", "to": "Front", "requests_per_s": 12.5, "errors_per_s": 0.0},
            {"from": "Front", "to": "Back", "requests_per_s": 7.25, "errors_per_s": 0.5},
        ]
        page.feeds.set(app__shop=application("shop", **shop), live__={"http": _METRICS, "calls": calls})
        await page.go("/graph")
        rates = "[...document.querySelectorAll('.graph .rate')].map((each) => each.textContent).join()"
        await tab.until(f"{rates} === '7.25/s,12.5/s'")
        assert await tab.ask("document.querySelectorAll('.edge.failing').length") == 1
        # A deployment without callers is drawn beside the called ones, not among the clients.
        places = "[...document.querySelectorAll('.graph a .box')].map((each) => each.getAttribute('x'))"
        front, back, broken = await tab.ask(places)
        assert front == broken != back
        await page.go("/app/shop/Front")
        await tab.until("$('main').innerText.includes('2 of 3 wanted replicas run.')")
        assert await tab.ask("$('main').innerText.includes('latency wants 3, of 1 to 4 allowed: busy')")


async def test_a_continuous_batch_has_its_slots_and_outputs() -> None:
    async with site() as page:
        tab = page.tab
        page.feeds.set(app__shop=application("shop", Front=deployment("Front")), live__Front=LIVE)
        await page.go("/app/shop/Front")
        await tab.until("document.querySelector('main').innerText.includes('of 8 taken')")
        text = await tab.ask("document.querySelector('main').innerText")
        assert "2 requests wait for a slot" in text
        assert "310" in text
        cells = "[...document.querySelectorAll('.rows .row > *')].map((each) => each.textContent)"
        assert {"Slots6/8", "Outputs/s310"} <= set(await tab.ask(cells))
        # Rows fit in their card at each width at which columns appear or disappear.
        out = (
            "[...document.querySelectorAll('.grid .row > *, .grid .button')].filter((each) => "
            "each.closest('.card').getBoundingClientRect().right < each.getBoundingClientRect().right - 1)"
            ".length"
        )
        for width in (360, 761, 1001, 1024, 1101, 1201):
            await tab.resize(width, 800)
            await tab.until(f"innerWidth === {width} && document.querySelector('.rows .row')")
            await tab.until(f"{out} === 0", 5)


async def test_a_page_keeps_what_it_saw_until_the_instance_is_there_again_and_never_waits_for_ever() -> None:
    async with site() as page:
        tab, feeds = page.tab, page.feeds
        feeds.set(app__old=application("old", Front=deployment("Front")))
        feeds.feed.events.append(event(50, "old"))
        feeds.feed._wake()
        await tab.until("site.deployments.length === 1 && site.events.length === 1")
        await tab.ask("connect(), connect(), connect(), 1")
        await tab.until("site.link === 'on' && source && source.readyState === 1")
        feeds.set(controller=ONLINE | {"message": " "})  # a stream that nobody reads is found to be closed
        async with asyncio.timeout(10):
            while feeds.readers != 1:  # noqa: ASYNC110 - the handlers only count
                await asyncio.sleep(0.02)
        # A new instance of the same name, whose controller has not started yet, with lower event numbers.
        feeds.restart()
        feeds.set(controller={"is_online": False, "message": "The controller does not answer."})
        await tab.until("site.link === 'off' && $('banner').textContent.includes('What you see')")
        assert await tab.ask("site.deployments.length") == 1
        feeds.feed.events.append(event(1, "new"))
        feeds.set(instance=INSTANCE, controller=ONLINE, app__new=application("new", Back=deployment("Back")))
        await tab.until("site.deployments.map((each) => each.name).join() === 'Back'")
        await tab.until("site.events.map((each) => each.application).join() === 'new'")
        # A page that opens while there is no controller shows no empty tables.
        feeds.restart()
        feeds.set(controller={"is_online": False, "message": "The controller does not answer."})
        await tab.open(page.url)
        await tab.until("document.querySelector('h1').textContent === 'Offline'")
        assert await tab.ask("document.querySelectorAll('.tile, .grid').length") == 0
        # A suspended scheduler keeps its connections, but does not answer.
        feeds.answers.clear()
        feeds.restart()
        await tab.until("$('banner').textContent.includes('did not answer within 7 s')", 20)
        feeds.answers.set()
        feeds.set(instance=INSTANCE, controller=ONLINE)
        await tab.until("site.link === 'on' && document.querySelector('h1').textContent === 'Overview'")


async def test_an_answer_is_shown_in_its_own_dialog_and_a_profile_distinguishes_work_from_waiting() -> None:
    async with site() as page:
        tab = page.tab
        page.feeds.set(app__shop=application("shop", Front=deployment("Front")))
        await page.go("/app/shop/Front")
        press = "[...document.querySelectorAll({!r})].find((each) => each.textContent === {!r}).click()"
        await tab.until("document.querySelector('button[aria-label^=Stacks]')")
        page.feeds.answers.clear()
        await tab.ask(press.format("main button", "Stacks"))
        await tab.until("$('dialog').open")
        await tab.press("Escape")
        await tab.ask(press.format("main button", "Scale"))
        await tab.until("$('dialog').open && $('replicas')")
        page.feeds.answers.set()
        await tab.ask("api('serve/replicas/x/stacks').then(() => 1)")
        assert await tab.ask("$('dialog').textContent.includes('Scale Front')")
        await tab.ask("history.back()")
        await tab.until("!$('dialog').open")
        await page.go("/app/shop/Front")
        await tab.until("document.querySelector('button[aria-label^=Profile]')")
        await tab.ask(press.format("main button", "Profile"))
        await tab.until("document.querySelector('.flame .waits')")
        await tab.ask(press.format("#dialog button", "On a processor"))
        await tab.until("!document.querySelector('.flame .waits')")
        assert await tab.ask("document.querySelector('.flame').innerText.split('\\n').join()") == (
            "all, 100 %,works, 100 %"
        )
        # On a phone, all buttons of a dialog are inside it.
        await tab.resize(360, 740)
        await tab.until(
            "(() => { const within = document.querySelector('#dialog .choices').getBoundingClientRect();"
            "return [...document.querySelectorAll('#dialog .choices button')].every((each) => "
            "each.getBoundingClientRect().right <= within.right) && within.right < innerWidth; })()"
        )
        await tab.ask(press.format("#dialog button", "Memory"))
        await tab.until("$('dialog').innerText.includes('b/c/d.py:7')")
        await tab.resize(1280, 800)
        assert await tab.ask("$('dialog').innerText.includes('4 MiB in Python')")
        await tab.ask("$('dialog').close()")
        await tab.ask(press.format("main button", "Stacks"))
        await tab.until("$('dialog').innerText.includes('The process did not answer.\\nl1: in hold')")
        await tab.ask("$('dialog').close()")
        models = {"count": 2, "capacity": 3, "models": ["<b>one</b>", "two"]}
        shown = deployment("Front")
        shown["replicas"][0]["models"] = models
        page.feeds.set(app__shop=application("shop", Front=shown))
        await tab.until("document.querySelector('.rows').textContent.includes('2 / 3  <b>one</b>, two')")
        # After one failed answer, the existing and the following lines are shown.
        await page.go("/logs")
        shown = "document.querySelectorAll('#logs li').length"
        await tab.until(f"{shown} === 1 && $('main').innerText.includes('No controller answers.')")
        await tab.until(f"{shown} > 1 && !$('main').innerText.includes('No controller answers.')")
        tab.troubles.clear()


async def test_actions_ask_first_and_say_what_the_scheduler_answered() -> None:
    async with site() as page:
        tab = page.tab
        rollout = {
            "state": "PAUSED",
            "version": "2",
            "stable": "1",
            "since": 1.0,
            "began_at": 1.0,
            "step": 1,
            "why": "",
            "steps": ["5%", "100%"],
            "share": 0.05,
            "gates": [],
        }
        page.feeds.set(
            app__shop=application(
                "shop", Front=deployment("Front", rollout=rollout), refused=deployment("refused")
            )
        )

        async def act(place: str, button: str, confirm: str) -> None:
            await page.go(place)
            await tab.until(
                "[...document.querySelectorAll('main button')]"
                f".some((each) => each.textContent === {button!r})"
            )
            await tab.ask(
                "[...document.querySelectorAll('main button')]"
                f".find((each) => each.textContent === {button!r}).click()"
            )
            await tab.until("$('dialog').open")
            assert page.notes == []
            await tab.until(
                f"document.querySelector('#dialog button[type=submit]').textContent === {confirm!r}"
            )
            await tab.ask("document.querySelector('#dialog button[type=submit]').click()")
            async with asyncio.timeout(10):
                while not page.notes:  # noqa: ASYNC110 - the handler only notes
                    await asyncio.sleep(0.02)

        front = "api/serve/applications/shop/deployments/Front"
        for place, button, asked in (
            ("/app/shop/Front", "Restart", f"{front}/restart"),
            ("/app/shop/Front", "Scale", f"{front}/num_replicas"),
            ("/app/shop/Front", "Promote", f"{front}/rollout/promote"),
            ("/app/shop/Front", "Abort", f"{front}/rollout/abort"),
            ("/app/shop", "Roll back", "api/serve/applications/shop/rollback"),
        ):
            await act(place, button, button)
            assert page.notes.pop()[1] == asked
            await tab.until("!$('dialog').open")
        await act("/app/shop/refused", "Scale", "Scale")
        page.notes.clear()
        await tab.until("$('dialog').open && $('dialog').textContent.includes('It is autoscaled.')")
        # During a change, the page offers the previous revision, but not the one being deployed.
        page.feeds.set(app__changing=application("changing", Front=deployment("Front", tag="changing/Front")))
        await page.go("/app/changing")
        await tab.until("document.querySelector('main h1').textContent === 'changing'")
        await tab.ask(
            "[...document.querySelectorAll('main button')]"
            ".find((each) => each.textContent === 'Roll back').click()"
        )
        await tab.until(
            "[...document.querySelectorAll('#dialog input')].map((each) => each.value).join() === '2,1'"
        )
        await tab.press("Escape")
        await tab.until("!$('dialog').open")


async def test_a_checker_finds_no_barriers(tmp_path: Path) -> None:
    packed = shutil.which("npm") and subprocess.run(
        ["npm", "install", "--prefix", str(tmp_path), "axe-core@4"], capture_output=True, timeout=120
    )
    if not packed or packed.returncode:
        pytest.skip("needs npm, and the package axe-core")
    axe = (tmp_path / "node_modules/axe-core/axe.min.js").read_text()
    async with site() as page:
        tab = page.tab
        dead = [
            {
                "name": "Front#a",
                "reason": "it was lost",
                "at": 1.0,
                "user_traceback": "Traceback",
                "last_lines": ["x"],
            }
        ]
        rollout = {
            "state": "PAUSED",
            "version": "2",
            "stable": "1",
            "since": 1.0,
            "began_at": 1.0,
            "step": 1,
            "why": "",
            "steps": ["5%", "100%"],
            "share": 0.05,
            "gates": [],
        }
        message = "no room\nTraceback (most recent call last):\n  in __init__"
        back = deployment("Back", "UNHEALTHY", dead_replicas=dead, message=message, is_ingress=False)
        page.feeds.set(
            app__shop=application(
                "shop", Front=deployment("Front", rollout=rollout, needs=["Back"]), Back=back
            )
        )
        page.feeds.set(live__Front=LIVE)
        await tab.until("site.deployments.length === 2")
        # The page's security policy refuses other scripts, so the checker is injected through the browser.
        await tab.send("Page.setBypassCSP", enabled=True)
        await tab.open(page.url)
        await tab.until("site.deployments.length === 2")
        await tab.ask(axe + ";1")
        all_found: list[Any] = []
        check = (
            "axe.run().then((all) => all.violations.map((each) => [each.id, each.nodes"
            ".map((one) => one.html + one.failureSummary)]))"
        )
        for is_dark in (False, True):
            for size in ((1280, 800), (360, 740)):
                await tab.resize(*size, is_dark=is_dark)
                for place in (
                    "",
                    "/app/shop",
                    "/app/shop/Front",
                    "/app/shop/Back",
                    "/graph",
                    "/events",
                    "/logs",
                    "/system",
                ):
                    await page.go(place)
                    await tab.until("document.querySelector('main h1')")
                    await asyncio.sleep(0.3)
                    all_found += [(place, size, is_dark, each) for each in await tab.ask(check)]
                for what, content in (("profile", ".flame"), ("memory", ".sheet"), ("stacks", "pre")):
                    await tab.ask(f"{what}({{ id: 'Front#abc' }}), 1")
                    await tab.until(f"document.querySelector('#dialog {content}')")
                    all_found += [(what, size, is_dark, each) for each in await tab.ask(check)]
                await tab.ask("$('dialog').close()")
        assert all_found == []


async def test_a_real_cluster_is_shown_as_its_status_says(external: ExternalCluster) -> None:
    def front(request: Any) -> str:
        return "one"

    with serve.start(dask_client=external.client, http_options={"port": 0}) as client:
        await asyncio.to_thread(client.run, serve.deployment(front).bind(), name="shop", route_prefix="/")
        async with chromium() as tab:
            await tab.resize(1280, 800)
            await tab.open(f"{dashboard(external.client)}/daskserve")
            await tab.until("document.querySelector('.rows .chip.good')")
            await tab.until("live('shop/front').requests_per_s === 0", 30)
            await asyncio.to_thread(client.delete_application, "shop")
            await tab.until("site.deployments.length === 0", 5)
            assert tab.troubles == []


async def lateness(tab: Tab, condition: str, is_so: Callable[[], object], limit_s: float = 40) -> float:
    """Return the delay of the page behind the status, in seconds."""
    seen: dict[str, float] = {}

    async def watch(name: str, look: Callable[[], Awaitable[object]]) -> None:
        until = time.monotonic() + limit_s
        while not await look():
            assert time.monotonic() < until, (name, condition)
            await asyncio.sleep(0.02)
        seen[name] = time.monotonic()

    page = watch("page", lambda: tab.ask(condition))
    await asyncio.gather(page, watch("status", lambda: asyncio.to_thread(is_so)))
    return seen["page"] - seen["status"]


@pytest.mark.limit_s(300)
async def test_a_thousand_deployments_are_shown_as_their_status_says(external: ExternalCluster) -> None:
    """Within a second of the status, although the page only gets changes."""

    def model(request: Any) -> str:
        return "one"

    def target(name: str) -> serve.RunTarget:
        bound = serve.deployment(model, ray_actor_options={"num_cpus": 0}).bind()
        return serve.RunTarget(bound, name=name, route_prefix=f"/{name}")

    def known() -> dict[str, str]:
        status = client.status()
        return {
            f"{name}/model": each.deployments["model"].status for name, each in status.applications.items()
        }

    shown = "Object.fromEntries(site.deployments.map((each) => [each.tag, each.status]))"
    with serve.start(dask_client=external.client, http_options={"port": 0}) as client:
        await asyncio.to_thread(client.run_many, [target(f"a{number:03}") for number in range(1000)])
        async with chromium() as tab:
            await tab.resize(1280, 800)
            await tab.open(f"{dashboard(external.client)}/daskserve")
            await tab.until("site.deployments.length === 1000")
            assert await tab.ask(shown) == await asyncio.to_thread(known)
            running = asyncio.create_task(asyncio.to_thread(client.run_many, [target("late")]))
            late = [
                await lateness(
                    tab,
                    f"{shown}['late/model'] === 'HEALTHY'",
                    lambda: known().get("late/model") == "HEALTHY",
                )
            ]
            await running
            deleting = asyncio.create_task(asyncio.to_thread(client.delete_application, "a500"))
            late.append(
                await lateness(tab, f"!('a500/model' in {shown})", lambda: "a500/model" not in known())
            )
            await deleting
            assert await tab.ask(shown) == await asyncio.to_thread(known)
            assert tab.troubles == []
        assert max(late) < 1.0, late


PRESS = "[...document.querySelectorAll({!r})].find((each) => each.textContent === {!r}).click()"


async def test_a_gate_takes_a_version_back_and_a_button_returns_to_another_one(
    external: ExternalCluster,
) -> None:
    """The page shows each state that the status has, within a second of it."""

    def version(name: str, *, fails: bool = False) -> Any:
        def front(request: Any) -> str:
            return str(1 // 0) if fails else name

        plan = {"steps": ["50%", "100%"], "pause_s": 3600}
        return serve.deployment(front, version=name, rollout=plan).bind()

    def ask() -> str:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            return str(answer.read().decode())
        return ""

    def rollout(state: str) -> bool:
        return client.rollout_status("front", "shop")["state"] == state

    with serve.start(dask_client=external.client, http_options={"port": 0}) as client:
        url = client.http_urls()[0]
        for name in ("1", "2"):
            await asyncio.to_thread(client.run, version(name), name="shop", route_prefix="/")
            await asyncio.to_thread(
                client.promote_rollout, "front", "shop", full=True
            ) if name == "2" else None
        async with chromium() as tab:
            await tab.resize(1280, 800)
            name = client.instance_name
            await tab.open(f"{dashboard(external.client)}/daskserve#/{name}/app/shop/front")
            await tab.until("document.querySelector('main h1')")
            running = asyncio.to_thread(client.run, version("3", fails=True), name="shop", route_prefix="/")
            deploying = asyncio.create_task(running)
            late = [
                await lateness(tab, "!!document.querySelector('.steps .now')", lambda: rollout("SERVING"))
            ]

            async def load() -> None:
                while True:
                    await asyncio.to_thread(ask)

            asking = asyncio.create_task(load())
            back = "document.querySelector('main').innerText.includes('Rolled back')"
            late.append(await lateness(tab, back, lambda: rollout("ROLLED_BACK")))
            asking.cancel()
            await deploying
            assert await tab.ask("document.querySelector('main').innerText.includes('Reason')")
            await tab.until("document.querySelector('main').innerText.includes('Rollout taken back')")
            await tab.ask(f"location.hash = '#/{name}/app/shop'")
            await tab.until("document.querySelector('main h1').textContent === 'shop'")
            await tab.ask(PRESS.format("main button", "Roll back"))
            await tab.until("document.querySelectorAll('#dialog input[name=revision]').length")
            await tab.ask("[...document.querySelectorAll('#dialog input[name=revision]')].at(-1).click()")
            await tab.ask(PRESS.format("#dialog button", "Roll back"))
            await tab.until("document.querySelector('main').innerText.includes('rolls back to 1')", 20)
            assert tab.troubles == []
        assert max(late) < 1.0, late
