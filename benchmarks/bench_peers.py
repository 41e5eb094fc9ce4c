"""Requests per second of daskserve and other serving systems, in the same run.

Each system answers two bytes to ``wrk -t1 -c32``. mosec, LitServe and BentoML accept only POST, so daskserve
is compared with them on POST requests. Requests differ in query, headers and body; every system gets the
same ones. daskserve runs in two workers with ``event_loop="worker"``, on Tornado and on asyncio; ``peers/``
contains the other systems. Systems take turns, and each ratio is the median of the ratios.

The peers need a separate environment: ``python -m venv DIR``, then ``DIR/bin/pip install "ray[serve]" mosec
litserve bentoml fastapi uvicorn httptools uvloop`` (Ray's fastest setting needs the program ``haproxy`` too).
Run: ``python benchmarks/bench_peers.py --python DIR/bin/python [--only WORD]``.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from http_load import Place, end_on_sigterm, need_wrk, program, serving, wrk

PEERS = Path(__file__).parent / "peers"
PEER_PROGRAMS = {
    "FastAPI on two uvicorn workers": ("fastapi_uvicorn.py", (), "GET"),
    "mosec": ("mosec_worker.py", (), "POST"),
    "LitServe": ("litserve_noop.py", (), "POST"),
    "BentoML": ("bentoml_noop.py", (), "POST"),
    "Ray Serve": ("ray_serve.py", (), "GET"),
    "Ray Serve with HAProxy": ("ray_serve.py", ("haproxy",), "GET"),
}


def measure(name: str, server: str, python: str, *, runs: int, seconds: float) -> None:
    file, arguments, kind = PEER_PROGRAMS[name]
    place = Place(workers=2, server=server, config={"event_loop": "worker"})
    with serving(place) as us, program(PEERS / file, *arguments, python=python) as peer:
        ratios, results = [], []
        for number in range(runs + 1):
            pair = [wrk(each, connections=32, seconds=seconds, kind=kind) for each in (us, peer)]
            if number:  # the first run is a warm-up
                results.append(pair)
                ratios.append(pair[0].rate / pair[1].rate)
    rate = statistics.median(theirs.rate for _, theirs in results)
    cpu_us, peer_cpu_us = (statistics.median(pair[at].cpu_us for pair in results) for at in (0, 1))
    print(
        f"{name:32} {rate:7.0f}/s; daskserve under {server:8} "
        f"{statistics.median(ratios):5.1f} times ({min(ratios):.1f} to {max(ratios):.1f}); "
        f"CPU per request {cpu_us:.0f} µs, theirs {peer_cpu_us:.0f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="interpreter of the environment with the peers")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--only", default="", help="measure only the peers whose name contains this text")
    given = parser.parse_args()
    end_on_sigterm()
    need_wrk()
    for name in PEER_PROGRAMS:
        for server in ("tornado", "asyncio"):
            if given.only in name:
                measure(name, server, given.python, runs=given.runs, seconds=given.seconds)


if __name__ == "__main__":
    main()
