"""The cost of each router's choice, the effect of a slow replica on the tail, and the rate of cache hits.

Pure: no cluster, no sockets; the latencies are in virtual time.

1. The time to choose a replica and to record the end of the request, with 10, 100 and 1,000 replicas. It is
   process time; a user's router has its own thread, which is included. Prompts have 2,000 characters, and
   8,000 in the last row. Bound: 20 us.
2. Percentiles of latencies of 8 replicas at half of their capacity, one of which takes 10 times as long.
3. Conversations of 20 turns by 40 users on 4 replicas: the share of each prompt that its replica has seen
   before.

Run: ``python benchmarks/bench_routers.py``. It exits with 1 if a choice exceeds the bound.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from daskserve.common.types import Envelope, EnvelopeKind, Load
from daskserve.data.caller.pool.replica_pool import ReplicaPool
from daskserve.data.caller.request_routers.interface import RequestRouter, Setup
from daskserve.data.caller.request_routers.routing import RequestRouting
from daskserve.payload.pickling import dump

SIZES = (10, 100, 1000)
ROUNDS, REQUESTS = 5, 2000
BOUND_US = 20.0
WORDS = "the replica that has the beginning of a prompt in its cache answers sooner than any other".split()


class Own(RequestRouter):
    """A router written by a user."""

    def choose_replicas(self, candidate_replicas: Any, pending_request: Any = None) -> Any:
        return [candidate_replicas[:2]]


ROUTERS = ("RoundRobin", "ConsistentHash", "LeastLatency", "SameHost", "PrefixAffinity", f"{__name__}:Own")


#: The same with the prompt in the body of an HTTP request.
BY_HTTP = "PrefixAffinity, HTTP"


class Stage:
    """The replicas of a process, and the router that chooses among them, by default PowerOfTwo."""

    def __init__(self, router: str, size: int, now: Callable[[], float]) -> None:
        self.rng = random.Random(1)
        self.pool = ReplicaPool(lambda address: False)
        self.pool.update({f"d#{number}": (f"tcp://h:{number}", 1) for number in range(size)}, 100, str)
        self.now = now
        self.routing = None
        if router != "PowerOfTwo":
            self.routing = RequestRouting(Setup(router), "d", self.pool, self.rng, "h")

    def take(self, envelope: Envelope, body: bytes) -> Any:
        if self.routing is None:
            return self.pool.take(self.now(), self.rng)
        if body:
            self.routing.request_of(envelope).body = body
        return self.routing.take(envelope, self.now())

    def end(self, replica: Any, envelope: Envelope) -> None:
        if self.routing is not None:
            self.routing.ended(envelope, self.now(), Load())
        self.pool.report(replica, Load(max(replica.in_flight - 1, 0)), self.now())
        self.pool.release(replica)


def prompt(rng: random.Random, characters: int = 2000) -> str:
    words: list[str] = []
    while sum(map(len, words)) + len(words) < characters:
        words.append(rng.choice(WORDS))
    return " ".join(words)


def call(session: str, *args: Any) -> Envelope:
    facts = {"session_id": session}
    return Envelope(EnvelopeKind.CALL, {"method": "ask", "facts": facts, "request_id": "x"}, dump((args, {})))


async def cost_us(router: str, size: int, characters: int = 2000) -> float:
    """Return the minimum time of a choice; the request has a session or a prompt if the router uses it."""
    is_http = router == BY_HTTP
    router = router.partition(",")[0]
    stage = Stage(router, size, asyncio.get_running_loop().time)
    await asyncio.sleep(0.05)  # loads the user's router
    rng = random.Random(2)
    texts = [prompt(rng, characters) for _ in range(50)] if router == "PrefixAffinity" else [""]
    bodies = [json.dumps({"model": "m", "prompt": each}).encode() if is_http else b"" for each in texts]
    found = []
    for _ in range(ROUNDS):
        chosen = rng.choices(range(len(texts)), k=REQUESTS)
        envelopes = [
            Envelope(EnvelopeKind.HTTP, {"type": "http", "headers": []})
            if is_http
            else call(f"s{rng.randrange(500)}", texts[number])
            for number in chosen
        ]
        gc.collect()
        began = time.process_time()
        for number, envelope in zip(chosen, envelopes, strict=True):
            replica = stage.take(envelope, bodies[number])
            stage.end(replica, envelope)
        found.append((time.process_time() - began) / REQUESTS * 1e6)
    if stage.routing is not None:
        assert not stage.routing.errors.fallbacks
        stage.routing.close()
    return min(found)


async def tail(router: str, count: int = 20_000) -> list[float]:
    """Return latencies in ms: 8 replicas with one slot, of which one takes 100 ms and the others 10 ms."""
    now = 0.0
    stage = Stage(router, 8, lambda: now)
    loop: Any = asyncio.get_running_loop()
    loop.time, real = (lambda: now), loop.time
    rng, took = random.Random(3), []
    ends: list[tuple[float, int, float, Any, Envelope]] = []
    number, free_at = itertools.count(), dict.fromkeys(stage.pool.entries(), 0.0)
    try:
        for at in itertools.accumulate(rng.expovariate(0.5 * 710) for _ in range(count)):
            while ends and ends[0][0] <= at:
                now, _, began, replica, envelope = heapq.heappop(ends)
                took.append((now - began) * 1e3)
                stage.end(replica, envelope)
            now = at
            envelope = call(f"s{rng.randrange(500)}", "")
            replica = stage.take(envelope, b"")
            work_s = rng.expovariate(1 / (0.1 if replica.tag == "d#0" else 0.01))
            free_at[replica.tag] = max(free_at[replica.tag], now) + work_s
            heapq.heappush(ends, (free_at[replica.tag], next(number), now, replica, envelope))
    finally:
        loop.time = real
    return sorted(took)


async def hits(router: str) -> float:
    """Return the mean share of a prompt that the chosen replica has seen before."""
    stage = Stage(router, 4, asyncio.get_running_loop().time)
    rng = random.Random(4)
    system = prompt(rng, 500)
    seen: dict[str, set[str]] = {tag: set() for tag in stage.pool.entries()}
    known = total = 0
    talks = dict.fromkeys(range(40), system)
    flying: list[tuple[Any, Envelope]] = []
    for _ in range(20 * len(talks)):
        user = rng.randrange(len(talks))
        talks[user] += " " + prompt(rng, 200)
        body = json.dumps({"prompt": talks[user]}).encode()
        head = {"type": "http", "method": "POST", "headers": [(b"x-session-id", str(user).encode())]}
        envelope = Envelope(EnvelopeKind.HTTP, head, has_body=True)
        replica = stage.take(envelope, body)
        blocks = [talks[user][: at + 64] for at in range(0, len(talks[user]), 64)]
        known += sum(each in seen[replica.tag] for each in blocks)
        total += len(blocks)
        seen[replica.tag].update(blocks)
        flying.append((replica, envelope))
        if len(flying) > 8:
            stage.end(*flying.pop(0))
    return known / total


def main() -> int:
    is_good = True
    print(f"{'us a choice, bound ' + str(BOUND_US):24}" + "".join(f"{size:>10}" for size in SIZES))
    for router, characters in (
        *((name, 2000) for name in ("PowerOfTwo", *ROUTERS)),
        ("PrefixAffinity", 8000),
        ("PrefixAffinity", 32_000),
        (BY_HTTP, 32_000),
    ):
        costs = [asyncio.run(cost_us(router, size, characters)) for size in SIZES]
        is_good = is_good and max(costs) <= BOUND_US
        print(f"{router:24}" + "".join(f"{cost:10.1f}" for cost in costs))
    print(f"{'ms with a slow replica':24}" + "".join(f"{name:>10}" for name in ("mean", "p50", "p99")))
    for router in ("PowerOfTwo", *ROUTERS[:-1]):
        took = asyncio.run(tail(router))
        values = (statistics.fmean(took), took[len(took) // 2], took[len(took) * 99 // 100])
        print(f"{router:24}" + "".join(f"{value:10.1f}" for value in values))
    for router in ("PowerOfTwo", "ConsistentHash", "PrefixAffinity"):
        print(f"{router:24} share of the prompts in the cache {asyncio.run(hits(router)):.2f}")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
