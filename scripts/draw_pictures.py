"""Draw the pictures of docs/: a request's way, a rollout, and the autoscaling of a day.

The first is drawn from the modules that a real request enters, the second from the states of a small cluster,
the third from a simulation. Run: ``python scripts/draw_pictures.py``.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from count_modules import case_of

import daskserve as serve
from daskserve.common.clock import seeded_rng
from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.simulation.fleet import Service, simulate
from daskserve.simulation.svg import plot
from daskserve.simulation.trace import Trace
from daskserve.testing import local_instance

PICTURES = Path(__file__).parent.parent / "docs/pictures"
#: The role of each component in a request.
COMPONENTS = {
    "proxies/server": "reads and writes the socket",
    "proxies/exchange": "one request and its response",
    "proxies/exchange/request": "reads the head and the body",
    "proxies/exchange/limits": "enforces the limits",
    "proxies/exchange/response": "writes the response",
    "data/caller/pool": "ranks the replicas",
    "proxies/ingress": "finds the route",
    "data/caller/routing": "chooses a replica",
    "cluster/channel": "carries messages between processes",
    "cluster/channel/wire": "frames on a Dask comm",
    "cluster/actors": "finds the replica",
    "data/replica": "this replica",
    "data/replica/requests": "takes a slot",
    "data/replica/execution": "runs user code in a thread",
    "data/replica/user_code": "calls the user's class",
}
#: Components with helper modules, which are left out.
HELPERS = {"common", "loops", "telemetry", "payload"}
BLUE, GREEN, YELLOW, GRAY, TEXT = "#2f6fb3", "#3a7d44", "#d9a404", "#cbd2d9", "#1f2933"
WIDTH, COLUMN, ROW, MARGIN = 900, 414, 44, 24
STATES = {"STARTING": YELLOW, "STOPPING": GRAY}


def svg(height: float, parts: Iterable[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
            f'viewBox="0 0 {WIDTH} {height:.0f}" font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{height:.0f}" fill="white"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def text(x: float, y: float, words: str, style: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="{TEXT}" {style}>{escape(words)}</text>'


def components_of(process: Sequence[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """Return the components that a request enters in a process, in order, each with its modules."""
    modules = list(dict.fromkeys(module for module, _ in process))
    components: dict[str, list[str]] = {}
    for module in modules:
        component, _, name = module.rpartition("/")
        if component not in HELPERS:
            components.setdefault(component, []).append(name.removesuffix(".py"))
    ordered = list(components.items())
    starts = [place for place, (component, _) in enumerate(ordered) if component == "proxies/server"]
    # The first entries are the end of the previous request.
    return ordered[starts[0] :] + ordered[: starts[0]] if starts else ordered


def request_picture() -> str:
    """Draw the components that a warm GET enters when the replica is in another process."""
    processes = [components_of(process) for process in case_of("hop")]
    processes = sorted((each for each in processes if each), key=lambda each: each[0][0] != "proxies/server")
    parts, bottom = [], 0.0
    titles = ("the proxy's process", "the replica's process")
    for number, (title, components) in enumerate(zip(titles, processes, strict=True)):
        x = MARGIN + number * (COLUMN + MARGIN)
        parts.append(text(x, MARGIN + 4, title, 'font-weight="bold" font-size="14"'))
        for place, (component, modules) in enumerate(components):
            y = MARGIN + 20 + place * (ROW + 14)
            parts.append(
                f'<rect x="{x}" y="{y}" width="{COLUMN}" height="{ROW}" rx="6" fill="none" stroke="{BLUE}"/>'
            )
            parts.append(
                text(x + 10, y + 18, f"{component}: {COMPONENTS.get(component, '')}", 'font-weight="bold"')
            )
            parts.append(text(x + 10, y + 35, ", ".join(modules), 'font-size="10"'))
            if place:
                parts.append(
                    f'<path d="M{x + COLUMN / 2} {y - 14}v9m-4 0l4 5l4 -5" fill="none" stroke="{TEXT}"/>'
                )
            bottom = max(bottom, y + ROW)
        if number == 0:
            parts.append(
                f'<path d="M{x + COLUMN} {y + ROW / 2}h{MARGIN / 2}V{MARGIN + 20 + ROW / 2}h{MARGIN / 2}'
                f'm-5 -4l5 4l-5 4" fill="none" stroke="{TEXT}"/>'
            )
    parts.append(text(MARGIN, bottom + 20, "The response goes back through the same objects."))
    return svg(bottom + MARGIN + 10, parts)


def rollout_picture() -> str:
    """Draw the states of the replicas of two deployments of the same name, one after the other."""
    seen: list[tuple[float, dict[str, str]]] = []
    ended = threading.Event()

    class Model:
        def __init__(self, version: int) -> None:
            time.sleep(0.4)

        def __call__(self, request: object) -> str:
            return "ok"

    with local_instance(workers=2) as client:

        def watch() -> None:
            while not ended.wait(0.01):
                states = {each.name.partition("#")[2]: each.state for each in client.status().replicas()}
                seen.append((time.monotonic(), states))

        deployment = serve.deployment(num_replicas=3, max_unavailable=0)(Model)
        thread = threading.Thread(target=watch)
        thread.start()
        client.run(deployment.bind(1), name="model")
        time.sleep(0.5)
        changed_at = time.monotonic()
        client.run(deployment.bind(2), name="model")
        time.sleep(0.5)
        ended.set()
        thread.join()
    return bars(seen, changed_at)


def bars(seen: Sequence[tuple[float, dict[str, str]]], changed_at: float) -> str:
    begin, end = seen[0][0], seen[-1][0]

    def place(at: float) -> float:
        return 120 + (WIDTH - 120 - MARGIN) * (at - begin) / (end - begin)

    parts = [
        text(
            120, 20, "yellow: starts · blue and green: serves the first and the second version · gray: stops"
        )
    ]
    replicas = list(dict.fromkeys(name for _, states in seen for name in states))
    for number, name in enumerate(replicas):
        y = 34 + number * 30
        points = [(at, states.get(name, "")) for at, states in seen]
        first = next(at for at, state in points if state)
        serving = BLUE if first < changed_at else GREEN
        parts.append(text(MARGIN, y + 15, name))
        for state, run in groupby(points, key=lambda point: point[1]):
            times = [at for at, _ in run]
            if state:
                left, right = place(times[0]), place(min(end, times[-1] + 0.01))
                parts.append(
                    f'<rect x="{left:.1f}" y="{y}" width="{max(1.0, right - left):.1f}" height="20" '
                    f'fill="{STATES.get(state, serving)}"/>'
                )
    bottom = 34 + len(replicas) * 30
    at = place(changed_at)
    parts.append(f'<path d="M{at:.1f} 28V{bottom}" stroke="{TEXT}" stroke-dasharray="4 3"/>')
    parts.append(text(at + 4, bottom + 14, "serve.run with the second version"))
    parts.append(text(WIDTH - MARGIN, bottom + 14, f"{end - begin:.1f} s", 'text-anchor="end"'))
    return svg(bottom + MARGIN, parts)


def autoscaling_picture() -> str:
    """Draw a day of load, and the number of replicas under three policies."""
    rng, day_s = seeded_rng(7), 24 * 3600
    counts = [
        rng.gauss(1, 0.2) * (40 - 30 * math.cos(2 * math.pi * second / day_s))
        + 120 * (43_000 < second < 44_000)
        for second in range(day_s)
    ]
    bounds = {"min_replicas": 1, "max_replicas": 30}
    configs = {
        "target_ongoing_requests": AutoscalingConfig(target_ongoing_requests=2, **bounds),
        "classic": AutoscalingConfig(target_ongoing_requests=2, policy="classic", **bounds),
    }
    service = Service(concurrency=4, duration_s=0.1, start_up_s=20)
    return plot([simulate(Trace(counts), config, service, name=name) for name, config in configs.items()])


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    for name, draw in (
        ("request", request_picture),
        ("rollout", rollout_picture),
        ("autoscaling", autoscaling_picture),
    ):
        (PICTURES / f"{name}.svg").write_text(draw(), encoding="utf-8")
