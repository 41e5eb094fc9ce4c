"""HTTP requests, each case compared with its floor in the same run.

Floors, on the same kind of event loop: Tornado's ``HTTPServer`` with a callback, and uvicorn with an
application of three lines, each in one process or in two that share a port. All answer two bytes to
``wrk -t1``. A case and its floor take turns, and each ratio is the median of the ratios. In cases with two
workers, each worker has a proxy and a replica. Requests differ in query and headers, for the case and for its
floor.

This benchmark needs ``wrk`` (Debian has a package). Run:
``python benchmarks/bench_requests.py [--runs N] [--seconds S] [--only WORD]``. It prints a line per case:
requests per second at 32 connections (unless the line names another number), the ratio to the floor with its
range, the CPU time of all serving processes per request, and as multiples of the floor's this CPU time, the
p99 there, and the p50 at one connection. Traces and logs are compared with the same case without them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from http_load import Place, System, end_on_sigterm, floor_of, need_wrk, serving, wrk

WORKER_LOOP = {"event_loop": "worker"}
#: Logs go to files, because the benchmark's standard output is read by a person; a line costs the same.
LOGS = {"logs_dir": os.path.join(tempfile.gettempdir(), "daskserve-bench-logs"), "output": "files"}


@dataclass(frozen=True)
class Case:
    """One case, which prints one line."""

    name: str
    place: Place
    floor: str = "floor_tornado"
    connections: int = 32

    def beside(self) -> AbstractContextManager[System]:
        """Start the reference: the floor of the case, or the same case without traces and logs."""
        if self.place.traced is not None or self.place.logged is not None:
            return serving(replace(self.place, traced=None, logged=None))
        return floor_of(self.floor, self.place.processes)


CASES = [
    Case("one hop", Place(hops=1)),
    Case("zero hop", Place()),
    Case("zero hop, worker's loop", Place(config=WORKER_LOOP)),
    Case("zero hop, two workers", Place(workers=2)),
    Case("zero hop, two workers, worker's loop", Place(workers=2, config=WORKER_LOOP)),
    Case(
        "asyncio, zero hop, two workers, worker's loop",
        Place(workers=2, server="asyncio", config=WORKER_LOOP),
        "floor_uvicorn",
    ),
    Case("asyncio, one hop", Place(hops=1, server="asyncio"), "floor_uvicorn", 100),
    # The floor of these cases is the same case without traces or logs.
    *(
        Case(f"asyncio, one hop, traces of {text}", Place(hops=1, server="asyncio", traced=ratio))
        for text, ratio in (("none", 0.0), ("1 %", 0.01), ("all", 1.0))
    ),
    *(
        Case(f"asyncio, {name}, {text}", Place(hops=hops, server="asyncio", logged=logged))
        for name, hops in (("zero hop", 0), ("one hop", 1))
        for text, logged in (
            ("logs without access log", {**LOGS, "enable_access_log": False}),
            ("access log", LOGS),
            ("access log, JSON", {**LOGS, "encoding": "JSON"}),
        )
    ),
]


def measure(case: Case, *, runs: int, seconds: float) -> None:
    pairs, alone = [], []
    with serving(case.place) as us, case.beside() as bottom:
        for each in (us, bottom):
            wrk(each, connections=case.connections, seconds=1)  # warm up
        for _ in range(runs):
            pairs.append([wrk(each, connections=case.connections, seconds=seconds) for each in (us, bottom)])
            one, floor = (wrk(each, connections=1, seconds=seconds / 2) for each in (us, bottom))
            alone.append(one.p50_us / floor.p50_us)
    ratios = [ours.rate / floor.rate for ours, floor in pairs]
    print(
        f"{case.name:46} {statistics.median(ours.rate for ours, _ in pairs):7.0f}/s  "
        f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})  "
        f"CPU {statistics.median(ours.cpu_us for ours, _ in pairs):.0f} µs, "
        f"{statistics.median(ours.cpu_us / floor.cpu_us for ours, floor in pairs):.2f} x  "
        f"p99 {statistics.median(ours.p99_us / floor.p99_us for ours, floor in pairs):.1f} x  "
        f"alone {statistics.median(alone):.2f} x",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--only", default="", help="measure only the cases whose name contains this text")
    given = parser.parse_args()
    end_on_sigterm()
    need_wrk()
    os.environ["OTEL_TRACES_EXPORTER"] = "none"  # spans are recorded, but not sent
    for case in CASES:
        if given.only in case.name:
            measure(case, runs=given.runs, seconds=given.seconds)


if __name__ == "__main__":
    main()
