"""Rollouts under load: the errors that clients see before a faulty version is rolled back.

Setup: two workers, a deployment with two replicas that fails 0.1 % of its requests, and a client that sends
GETs over four connections. A new version begins with 10 % of the traffic. Measured: how the rollout ends,
after how long, how many requests the new version failed, and when its last response came. That time counts
from the first failure if the version fails all requests, otherwise from the rollback in the status.

Run: ``python benchmarks/bench_rollout.py [--trials N]``. It prints a line per case and exits with 1 if a
rollout ends in another way than it should, or if a version that fails all requests still has traffic 10 s
after its first failure.
"""

from __future__ import annotations

import argparse
import http.client
import random
import statistics
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from distributed import Client, LocalCluster

import daskserve as serve

BOUND_S = 10.0
PLAN: dict[str, Any] = {"steps": ["10%", "50%", "100%"], "pause_s": 5}
#: The share of requests that the new version fails, and how its rollout should end.
CASES = {1.0: "ROLLED_BACK", 0.03: "ROLLED_BACK", 0.001: "COMPLETED"}


def version(name: str, fails: float, **options: Any) -> Any:
    class Model:
        def __init__(self) -> None:
            self.rng = random.Random()

        async def __call__(self, request: Any) -> str | float:
            return name if self.rng.random() >= fails else 1 // 0

    deployment: Any = serve.deployment(name="model", version=name, num_replicas=2, **options)
    return deployment(Model).bind()


@dataclass
class Load:
    """GETs over several connections until `end`, with the times of errors and of new responses."""

    address: str
    answers: dict[str, list[float]] = field(default_factory=lambda: {"old": [], "new": [], "error": []})
    over: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list)

    def begin(self, connections: int = 4) -> None:
        self.threads = [threading.Thread(target=self._run) for _ in range(connections)]
        for each in self.threads:
            each.start()

    def end(self) -> None:
        self.over.set()
        for each in self.threads:
            each.join()

    def _run(self) -> None:
        connection = http.client.HTTPConnection(self.address)
        while not self.over.is_set():
            connection.request("GET", "/")
            response = connection.getresponse()
            body = response.read().decode()
            self.answers[body if response.status == 200 else "error"].append(time.monotonic())


def once(fails: float) -> tuple[str, float, int, float]:
    """Return how and when a rollout ends, its failed requests, and the time of the last response."""
    with LocalCluster(n_workers=2, threads_per_worker=2, dashboard_address=None, protocol="tcp") as cluster:
        with Client(cluster) as dask, serve.start(http_options={"port": 0}, dask_client=dask) as client:
            client.run(version("old", 0.001))
            load = Load(client.http_urls()[0].partition("//")[2].rstrip("/"))
            load.begin()
            try:
                time.sleep(1)
                began, before = time.monotonic(), len(load.answers["error"])
                client.run(version("new", fails, rollout=PLAN))
                while (state := client.rollout_status("model")["state"]) not in CASES.values():
                    time.sleep(0.05)
                ended, failed = time.monotonic(), len(load.answers["error"]) - before
                time.sleep(1)
            finally:
                load.end()
            answers = load.answers["error"][before:] if fails == 1 else load.answers["new"]
            last_s = max(answers) - (answers[0] if fails == 1 else ended)
            return state, ended - began, failed, last_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=3)
    trials = parser.parse_args().trials
    is_wrong = False
    for fails, expected in CASES.items():
        found = [once(fails) for _ in range(trials)]
        states = [state for state, *_ in found]
        seconds, failed, last = (statistics.median(column) for column in list(zip(*found, strict=True))[1:])
        is_wrong |= states != [expected] * trials
        is_wrong |= fails == 1 and max(each[3] for each in found) > BOUND_S
        ends = f"{states.count(expected)} of {trials} {expected}"
        print(
            f"fails {100 * fails:g} %: {ends}, after {seconds:.1f} s, "
            f"{failed:.0f} failed requests, last answer {last:+.1f} s",
            flush=True,
        )
    sys.exit(is_wrong)


if __name__ == "__main__":
    main()
