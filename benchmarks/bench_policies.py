"""Comparison of autoscaling policies on synthetic loads, in the simulator's virtual time.

The default policy is compared with the classic policy (Ray Serve's, with its defaults) and Knative's (a
stable window of 60 s, a panic window of 6 s). All have the same target and bounds and get metrics once a
second. Run: ``python benchmarks/bench_policies.py``. The results are the same on every machine.

The default policy was developed with these loads. ``--drawn N`` uses N random loads instead, drawn with
``--seed``: steps, ramps, bursts and waves of random size and length, with service times from 20 ms to 2 s and
start times from 2 s to a minute.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence

from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.simulation.fleet import Service, SimulationResult, simulate
from daskserve.simulation.peers import knative_autoscaler
from daskserve.simulation.trace import Trace

TARGET, MOST = 2, 400
POLICIES = ("daskserve", "classic", "Knative")
#: Time of the first change of the load, in seconds.
BEGIN = 600


def poisson(mean: float, rng: random.Random) -> int:
    """Return a random number with a Poisson distribution's mean and spread; accurate enough above 10."""
    return max(0, round(rng.gauss(mean, math.sqrt(mean)))) if mean > 0 else 0


def made(seconds: int, rate: Callable[[int], float], seed: int = 1) -> Trace:
    """Return a trace with Poisson arrivals at a rate."""
    rng = random.Random(seed)
    return Trace([poisson(rate(second), rng) for second in range(seconds)])


def step(second: int) -> float:
    return 50 if second < BEGIN else 500


def ramp(second: int) -> float:
    return 50 + 450 * min(1.0, max(0.0, (second - BEGIN) / 600))


def spikes(second: int) -> float:
    return 400 if second >= BEGIN and second % 300 < 20 else 50


def diurnal(second: int) -> float:
    return 250 - 200 * math.cos(2 * math.pi * second / 86_400)


def constant(second: int) -> float:
    return 100


LOADS: Mapping[str, tuple[int, Callable[[int], float]]] = {
    "step x10": (1200, step),
    "ramp x10 in 10 min": (1800, ramp),
    "spikes x8 of 20 s": (3600, spikes),
    "a day": (86_400, diurnal),
    "constant, on a boundary": (3600, constant),
}


def run(policy: str, trace: Trace, service: Service, first: int, target: float = TARGET) -> SimulationResult:
    """Return the outcome of a policy on a trace; it starts with the replicas that the first load needs."""
    options = {"max_replicas": MOST, "initial_replicas": first, "target_ongoing_requests": target}
    if policy == "Knative":
        config = AutoscalingConfig(**options)
        return simulate(trace, config, service, name=policy, make=knative_autoscaler)
    if policy == "classic":
        config = AutoscalingConfig(policy="classic", **options)
    else:
        config = AutoscalingConfig(**options)
    return simulate(trace, config, service, name=policy)


def metrics(outcome: SimulationResult, rate: Callable[[int], float]) -> list[str]:
    """Return the table row of one outcome."""
    history, service = outcome.history, outcome.service
    seconds = range(len(history.target))
    needed = [max(1, math.ceil(rate(second) * service.duration_s / TARGET - 1e-9)) for second in seconds]
    overshoot = max(history.target) / max(needed)
    short = [
        second
        for second in seconds
        if history.running[second] * service.concurrency < rate(second) * service.duration_s
    ]
    waiting = [second for second in seconds if history.queued[second] > 50]
    return [
        f"{overshoot:.2f}",
        f"{len(short)}",
        f"{len(waiting)}",
        f"{outcome.wait_quantile_s(0.99):.2f}",
        f"{outcome.replica_hours:.1f}",
        f"{len(history.changes)}",
    ]


def drawn(rng: random.Random) -> tuple[int, Callable[[int], float], Service]:
    """Return a random load and service."""
    seconds = 2400
    base = 10 ** rng.uniform(0.7, 2.0)
    parts: list[tuple[str, int, int, float]] = []
    for _ in range(rng.randint(1, 4)):
        kind = rng.choice(("step", "ramp", "burst", "wave"))
        at, length = rng.randrange(300, seconds - 300), round(10 ** rng.uniform(0.7, 2.8))
        parts.append((kind, at, length, base * 10 ** rng.uniform(-0.3, 1.0)))

    def rate(second: int) -> float:
        total = base
        for kind, at, length, size in parts:
            since = second - at
            if kind == "wave":
                total += size * (1 - math.cos(2 * math.pi * second / (length + 60))) / 2
            elif kind == "burst":
                total += size if 0 <= since < length else 0
            elif since >= 0:
                total += size if kind == "step" else size * min(1.0, since / length)
        return total

    service = Service(
        concurrency=rng.randint(1, 16),
        duration_s=10 ** rng.uniform(-1.7, 0.3),
        start_up_s=10 ** rng.uniform(0.3, 1.8),
    )
    return seconds, rate, service


def compare_on_drawn(count: int, seed: int) -> None:
    """Print medians and worst tenths per policy over random loads."""
    rng = random.Random(seed)
    waits: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    costs: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    changes: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for number in range(count):
        seconds, rate, service = drawn(rng)
        target = max(1, service.concurrency // 2)
        trace = made(seconds, rate, seed=seed + number)
        needed = [
            max(1, math.ceil(rate(each) * service.duration_s / target - 1e-9)) for each in range(seconds)
        ]
        ideal_hours = sum(needed) / 3600
        for policy in POLICIES:
            outcome = run(policy, trace, service, needed[0], target=target)
            waits[policy].append(outcome.wait_quantile_s(0.99))
            costs[policy].append(outcome.replica_hours / ideal_hours)
            changes[policy].append(len(outcome.history.changes))
    ours = waits["daskserve"]
    heads = ("policy", "p99 wait, s", "replica-hours / needed", "changes", "waits less, more than ours")
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for policy in POLICIES:
        cells = [
            f"{quantile(found[policy], 0.5):.2f}, {quantile(found[policy], 0.9):.2f}"
            for found in (waits, costs, changes)
        ]
        less = sum(theirs < mine - 0.05 for theirs, mine in zip(waits[policy], ours, strict=True))
        more = sum(theirs > mine + 0.05 for theirs, mine in zip(waits[policy], ours, strict=True))
        print(f"| {policy} | {' | '.join(cells)} | {less}, {more} of {count} |")


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile of the values at a share."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


HEADS = (
    "load",
    "policy",
    "most replicas / needed",
    "s too few",
    "s of queue",
    "p99 wait, s",
    "replica-hours",
    "changes",
)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a Markdown table."""
    lines = [HEADS, tuple("---" for _ in HEADS), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--start-up-s", type=float, default=10.0)
    parser.add_argument("--loads", nargs="*", choices=list(LOADS), default=list(LOADS))
    parser.add_argument("--drawn", type=int, default=0, metavar="N", help="use N random loads instead")
    parser.add_argument("--seed", type=int, default=2026)
    arguments = parser.parse_args()
    if arguments.drawn:
        compare_on_drawn(arguments.drawn, arguments.seed)
        return
    service = Service(concurrency=5, duration_s=0.1, start_up_s=arguments.start_up_s)
    rows = []
    begin = time.perf_counter()
    for name in arguments.loads:
        seconds, rate = LOADS[name]
        trace = made(seconds, rate)
        first = max(1, math.ceil(rate(0) * service.duration_s / TARGET - 1e-9))
        for policy in POLICIES:
            rows.append([name, policy, *metrics(run(policy, trace, service, first), rate)])
    print(table(rows))
    print(f"\n{time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main()
