"""Draw the screens of docs/ from a cluster with faults that Prometheus scrapes.

The screens of Grafana are drawn from the answers of Prometheus; the terminal and Dask's dashboard are
recorded on the cluster. It needs Debian's packages prometheus and chromium, and takes ``--minutes``. The load
is that of tests/integration/test_dashboards.py, with a peak in the middle and a worker that is killed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import tempfile
import time
from contextlib import ExitStack
from html import escape
from pathlib import Path
from urllib.parse import urlencode

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / each) for each in ("tests/support", "tests/integration", "scripts")]

from chromium import chromium  # noqa: E402
from dashboard_load import Traffic, deploy, trouble  # noqa: E402
from dask_processes import ExternalCluster, dask_scheduler, dask_worker, fetch, poll_for  # noqa: E402
from distributed import Client, LocalCluster  # noqa: E402
from grafana.dashboards import DASHBOARDS  # noqa: E402
from grafana.panels import Dashboard, Panel, PanelKind, Row  # noqa: E402
from page_screens import draw_page  # noqa: E402
from panel_drawing import Series, named, screen  # noqa: E402
from scraping import dashboard, prometheus  # noqa: E402
from test_dashboards import command, substituted  # noqa: E402

import daskserve as serve  # noqa: E402

SCREENS = ROOT / "docs/screens"
STEP_S = 2


def file_of(dashboard: Dashboard, row: Row) -> str:
    """Return the file name of a screen."""
    return f"{dashboard.uid.removeprefix('daskserve-')}-{row.title.lower().replace(' ', '-')}.svg"


def ask(url: str, panel: Panel, chosen: dict[str, str], start: float, end: float) -> list[Series]:
    """Return the series that Prometheus has for a panel's queries."""
    found = []
    for query in panel.queries:
        is_now = panel.kind is PanelKind.TABLE
        asked = {"query": substituted(query.expression, chosen)}
        asked |= {"time": str(end)} if is_now else {"start": str(start), "end": str(end), "step": str(STEP_S)}
        reply = fetch(f"{url}/api/v1/query{'' if is_now else '_range'}?{urlencode(asked)}")
        assert reply.status == 200, (asked, reply.text)
        for each in json.loads(reply.text)["data"]["result"]:
            values = each.get("values") or [each["value"]]
            points = [(at - start, float(value)) for at, value in values]
            found.append(Series(named(query.legend, each["metric"]), each["metric"], points))
    return found


def pause(at: float, whole: float) -> float:
    """Return the factor of clients' pauses at a time of the run, which models a day with a peak at noon."""
    return 1.0 / (0.25 + 0.75 * math.sin(math.pi * min(1.0, max(0.0, at / whole))) ** 2)


def draw(minutes: float) -> None:
    seconds = 60 * minutes
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        address = stack.enter_context(dask_scheduler(folder))
        for name in ("worker-0", "worker-1"):
            stack.enter_context(dask_worker(address, folder, name=name))
        doomed = stack.enter_context(dask_worker(address, folder, name="doomed"))
        dask = stack.enter_context(Client(address, set_as_default=False))
        dask.wait_for_workers(3, timeout=30)
        client = stack.enter_context(serve.start(dask_client=dask, http_options={"port": 0}))
        command("grafana", "--output", str(folder / "set-up"), "--interval", "1")
        configuration = command("scrape-config", dashboard(dask), "--interval", "1")
        configuration += (
            f"global: {{evaluation_interval: 1s}}\nrule_files: [{folder}/set-up/prometheus/rules/*]\n"
        )
        scraped = stack.enter_context(prometheus(configuration, folder))
        poll_for(lambda: scraped.query("up"), 30)
        start = time.time()
        deploy(client, folder, num_replicas=3)
        began = time.monotonic()
        stack.enter_context(Traffic(client.http_urls()[0], lambda: pause(time.monotonic() - began, seconds)))
        time.sleep(max(0.0, 0.35 * seconds - (time.time() - start)))
        stack.enter_context(trouble(client, ExternalCluster(address, dask, folder), folder, wanted=4))
        time.sleep(max(0.0, 0.65 * seconds - (time.time() - start)))
        (SCREENS / "terminal-status.svg").write_text(
            terminal("daskserve status", str(client.status()).replace(f"{ROOT}/", ""))
        )
        doomed.kill()
        time.sleep(max(0.0, seconds - (time.time() - start)))
        write(scraped.url, client.instance_name, start, start + seconds)


def terminal(command: str, output: str) -> str:
    """Return a terminal with a command and its output as SVG."""
    lines = [line if len(line) < 120 else line[:119] + "…" for line in (f"$ {command}", *output.splitlines())]
    width, height = 24 + 7.3 * max(map(len, lines)), 20 + 16 * len(lines)
    texts = (
        f'<text x="12" y="{22 + 16 * number}" xml:space="preserve">{escape(line)}</text>'
        for number, line in enumerate(lines)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'font-family="monospace" font-size="12" fill="#e5e7eb">'
        f'<rect width="100%" height="100%" rx="8" fill="#1f2933"/>{"".join(texts)}</svg>\n'
    )


def draw_dask() -> None:
    """Save Dask's dashboard of a cluster that serves requests and runs tasks."""
    with (
        LocalCluster(n_workers=4, threads_per_worker=2, dashboard_address=":0") as cluster,
        Client(cluster) as dask,
    ):
        serve.run(serve.deployment(num_replicas=4)(lambda _: "ok").bind(), http_options={"port": 0})
        tasks = dask.map(lambda number: time.sleep(0.2) or number, range(1_000))
        (SCREENS / "dask-dashboard.png").write_bytes(asyncio.run(photograph(cluster.dashboard_link)))
        dask.cancel(tasks)
        panels = cluster.dashboard_link.replace("/status", "/daskserve-panels")
        with Traffic(serve.connect().http_urls()[0], lambda: 0.2):
            (SCREENS / "dask-panels.png").write_bytes(asyncio.run(photograph(panels)))
        serve.shutdown()


async def photograph(url: str) -> bytes:
    """Return a page as PNG after some seconds, when its data has arrived by WebSocket."""
    async with chromium() as tab:
        await tab.resize(1200, 640)
        await tab.open(url)
        await asyncio.sleep(8)
        return await tab.photograph()


def write(url: str, instance: str, start: float, end: float) -> None:
    SCREENS.mkdir(parents=True, exist_ok=True)
    for each in DASHBOARDS:
        chosen = {
            "job": "daskserve",
            "serve_instance": instance,
            "deployment": "model" if each.is_for_one_deployment else ".*",
            "__rate_interval": "10s",
        }
        results = {panel.title: ask(url, panel, chosen, start, end) for panel in each.panels()}
        for row in (row for row in each.rows if "no data" not in row.title):
            (SCREENS / file_of(each, row)).write_text(screen(each, row, results, end - start))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=4.0)
    minutes = parser.parse_args().minutes
    draw_dask()
    draw_page(SCREENS)
    draw(minutes)
