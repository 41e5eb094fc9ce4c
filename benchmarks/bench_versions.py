"""This version of daskserve and another one, loaded in turns: the CPU time of a request, as a ratio.

Both versions serve at the same time, each from its own checkout and environment, and wrk loads them
alternately for one second each. Other work on the machine thus affects both equally, and a ratio of a few
percent is visible. Each version is started several times, because the memory layout of a process affects its
speed.

The other checkout needs an environment in ``.venv``, as this one (``make .venv/.installed``), with ``pip
install fastapi scikit-learn`` for the applications. Run:
``python benchmarks/bench_versions.py --other DIR [--starts N] [--rounds N] [--only WORD]``. It prints a line
per case: the CPU time of both, the median of the ratios of a round with the medians of the starts as their
range, and the ratio of the rates.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from http_load import PROGRAMS, LoadResult, System, end_on_sigterm, need_wrk, program, wrk

HERE = Path(__file__).parent.parent
SERVE = PROGRAMS / "serve_case.py"


@dataclass(frozen=True)
class Case:
    """The application (see ``programs/serve_case.py``) and the load."""

    served: str
    server: str
    kind: str = "GET"
    connections: int = 32


CASES = [
    *(
        Case("no-op on the worker's loop", server, kind)
        for server in ("uvicorn", "tornado")
        for kind in ("GET", "item")
    ),
    Case("no-op", "uvicorn", "item"),
    *(Case("no-op, one hop", server, "GET", 100) for server in ("uvicorn", "tornado")),
    *(Case("FastAPI /item", server, "item") for server in ("uvicorn", "tornado")),
    *(Case(f"FastAPI {path}", "uvicorn", "image") for path in ("/plain", "/async")),
    Case("async class", "uvicorn", "image"),
    Case("batches of 16", "uvicorn", "image"),
    *(Case("batches of 32", "uvicorn", "image", count) for count in (32, 128)),
]


@contextmanager
def serving(case: Case, checkout: Path) -> Iterator[System]:
    """Serve a case from a checkout."""
    python = str(checkout / ".venv/bin/python")
    with program(SERVE, case.served, case.server, checkout / "benchmarks", python=python) as system:
        yield system


def compare(case: Case, other: Path, *, starts: int, rounds: int) -> None:
    pairs: list[list[tuple[LoadResult, LoadResult]]] = []
    for _ in range(starts):
        with ExitStack() as stack:
            ours, theirs = (stack.enter_context(serving(case, each)) for each in (HERE, other))
            pairs.append([])
            for number in range(rounds + 1):
                turn = (ours, theirs) if number % 2 else (theirs, ours)
                found = {
                    system: wrk(system, connections=case.connections, seconds=1, kind=case.kind)
                    for system in turn
                }
                if number:  # the first round is a warm-up
                    pairs[-1].append((found[ours], found[theirs]))
    every = [pair for start in pairs for pair in start]
    of_starts = [statistics.median(ours.cpu_us / theirs.cpu_us for ours, theirs in start) for start in pairs]
    ours_us, theirs_us = (statistics.median(each[place].cpu_us for each in every) for place in (0, 1))
    cpu = statistics.median(ours.cpu_us / theirs.cpu_us for ours, theirs in every)
    rate = statistics.median(ours.rate / theirs.rate for ours, theirs in every)
    name = f"{case.served}, {case.server}, {case.kind}, {case.connections}"
    print(
        f"{name:48} {ours_us:6.1f} µs beside {theirs_us:6.1f}  CPU {cpu:.3f} x "
        f"({min(of_starts):.3f} to {max(of_starts):.3f})  rate {rate:.3f} x",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--other", type=Path, required=True, help="the checkout of the other version")
    parser.add_argument("--starts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--only", default="", help="measure only the cases whose name contains this text")
    given = parser.parse_args()
    end_on_sigterm()
    need_wrk()
    if not (given.other / ".venv/bin/python").exists():
        sys.exit(f"{given.other} has no environment in .venv")
    for case in CASES:
        if given.only in f"{case.served}, {case.server}, {case.kind}, {case.connections}":
            compare(case, given.other.resolve(), starts=given.starts, rounds=given.rounds)


if __name__ == "__main__":
    main()
