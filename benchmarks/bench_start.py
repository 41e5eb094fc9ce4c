"""Start and deploy times and memory of an instance, each compared with its floor in the same run.

1. deploy: an instance runs and every task thread of the cluster is busy. Measured: the time from
   ``create_backend`` until a trivial backend's first 200. Floor: an empty actor created by a Host on the same
   busy cluster. ``blocked`` threads are in native code; ``python`` threads hold the interpreter lock, which
   is the worst case and has no bound.
2. hello: ``python hello.py`` as a new process without a cluster, until its first 200. Floor: a new process
   with the same bare two-worker cluster and a Tornado hello.
3. ten: an application of ten deployments, nine of which start side by side, and a chain of ten, which start
   one after the other. Floor: an application of one deployment. On two worker processes, and in one process.
4. memory: proportional set size of all processes, idle, with two workers and one replica. Floor: the bare
   cluster with its client.

Run: ``python benchmarks/bench_start.py [--runs N] [--case busy|hello|ten|memory]``. It prints one line per
metric (median, floor, ratio, bound) and exits with 1 if a bound is exceeded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

PROGRAMS = Path(__file__).parent / "programs"
DEPLOY_BOUND_S = 0.150
HELLO_BOUND_S = 2.5
TEN_BOUND_RATIO = 2.0
MEMORY_BOUND_RATIO = 1.35
MEMORY_BOUND_MIB = 350


def run_program(name: str, *arguments: str) -> dict[str, Any]:
    """Run one of the benchmark programs and return the JSON of its last line."""
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / name), *arguments], capture_output=True, text=True, timeout=120
    )
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stdout}\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def until_first_answer(name: str) -> float:
    """Return the seconds from starting a program until it reports that its server answered 200."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, str(PROGRAMS / name)], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    took = time.perf_counter() - began
    process.communicate("end\n", timeout=30)
    if line.strip() != "200":
        raise RuntimeError(f"{name} answered {line!r}")
    return took


def held_by(name: str) -> float:
    """Return the proportional set size, in MiB, of a program and all its children once it is idle."""
    process = subprocess.Popen(
        [sys.executable, str(PROGRAMS / name)], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(1.0)  # idle, until garbage of the start is freed
    own = psutil.Process(process.pid)
    total = sum(each.memory_full_info().pss for each in [own, *own.children(recursive=True)])
    process.communicate("end\n", timeout=30)
    return float(total) / 2**20


def medians(measure: Callable[[str], float], runs: int, *names: str) -> list[float]:
    """Return each program's median; programs run in turns, so that drift affects all equally."""
    metrics = [[measure(name) for name in names] for _ in range(runs)]
    return [statistics.median(column) for column in zip(*metrics, strict=True)]


def show_busy(runs: int) -> bool:
    is_good = True
    for kind, bound in (("blocked", f"{DEPLOY_BOUND_S * 1e3:.0f} ms"), ("python", "none")):
        found = run_program("deploy_busy.py", str(runs), kind)
        deploy, floor = found["deploy_s"], found["floor_s"]
        is_good &= kind == "python" or deploy <= DEPLOY_BOUND_S
        print(
            f"deploy, threads {kind:10} {deploy * 1e3:6.0f} ms   an empty actor {floor * 1e3:6.1f} ms   "
            f"ratio {deploy / floor:5.1f}   bound {bound}",
            flush=True,
        )
    return is_good


def show_hello(runs: int) -> bool:
    hello, floor = medians(until_first_answer, runs, "hello.py", "bare_hello.py")
    print(
        f"hello.py to the first 200  {hello:6.2f} s    bare cluster   {floor:6.2f} s    "
        f"ratio {hello / floor:5.2f}   bound {HELLO_BOUND_S} s",
        flush=True,
    )
    return hello <= HELLO_BOUND_S


def show_ten(runs: int) -> bool:
    is_good = True
    for place, where in (("cluster", "two workers"), ("local", "one process")):
        took = run_program("deploy_graph.py", str(runs), place)
        floor = statistics.median(took["one"])
        for case in ("wide", "chain"):
            ratios = [ten / one for ten, one in zip(took[case], took["one"], strict=True)]
            ratio = statistics.median(ratios)
            is_good &= ratio <= TEN_BOUND_RATIO
            print(
                f"ten deployments, {case:5}     {statistics.median(took[case]) * 1e3:6.0f} ms   "
                f"one, {where:11} {floor * 1e3:4.0f} ms   ratio {ratio:5.2f} "
                f"({min(ratios):.2f} to {max(ratios):.2f})   bound {TEN_BOUND_RATIO}",
                flush=True,
            )
    return is_good


def show_memory(runs: int) -> bool:
    held, floor = medians(held_by, min(runs, 3), "hello.py", "bare_cluster.py")
    print(
        f"memory held, idle (PSS)    {held:6.0f} MiB  bare cluster   {floor:6.0f} MiB  "
        f"ratio {held / floor:5.2f}   bound {MEMORY_BOUND_RATIO} and {MEMORY_BOUND_MIB} MiB",
        flush=True,
    )
    return held / floor <= MEMORY_BOUND_RATIO and held <= MEMORY_BOUND_MIB


CASES = {"busy": show_busy, "hello": show_hello, "ten": show_ten, "memory": show_memory}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="measured runs of each program (default 5)")
    parser.add_argument("--case", choices=CASES, help="only this case")
    given = parser.parse_args()
    held = [show(given.runs) for name, show in CASES.items() if given.case in (None, name)]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
