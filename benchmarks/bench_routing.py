"""Cost of assigning a request to a replica, with 1,000 replicas and with 10.

Pure: no cluster, no sockets, no event loop; process time. Each case takes a replica and releases it, as a
router does for one request. Bound of the ratio: 1.3.

Run: ``python benchmarks/bench_routing.py``. It exits with 1 if a case exceeds the bound.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable

from daskserve.data.caller.pool.pooled_replica import PooledReplica
from daskserve.data.caller.pool.replica_pool import ReplicaPool

FEW, MANY = 10, 1000
REQUESTS = 20_000
ROUNDS = 9
BOUND = 1.3
NOW = 0.5


def idle(size: int) -> ReplicaPool:
    pool = ReplicaPool(lambda address: False)
    pool.update({str(number): (f"tcp://{number}", 1) for number in range(size)}, 1, str)
    return pool


def fill(pool: ReplicaPool) -> list[PooledReplica]:
    rng = random.Random(0)
    taken = []
    while (entry := pool.take(NOW, rng)) is not None:
        taken.append(entry)
    return taken


def all_full_but_one(size: int) -> ReplicaPool:
    pool = idle(size)
    pool.release(fill(pool)[size // 2])
    return pool


def half_suspended(size: int) -> ReplicaPool:
    pool = idle(size)
    taken = fill(pool)
    for entry in taken[: size // 2]:
        pool.suspend(entry, NOW + 1)
    for entry in taken:
        pool.release(entry)
    return pool


def seconds(pool: ReplicaPool) -> float:
    rng = random.Random(1)
    began = time.process_time()
    for _ in range(REQUESTS):
        entry = pool.take(NOW, rng)
        assert entry is not None
        pool.release(entry)
    return time.process_time() - began


def main() -> int:
    cases: dict[str, Callable[[int], ReplicaPool]] = {
        "all idle": idle,
        "all full but one": all_full_but_one,
        "half of them suspended": half_suspended,
    }
    is_good = True
    for name, make in cases.items():
        few, many = make(FEW), make(MANY)
        # The cases take turns, so that other work on the machine affects both.
        pairs = [(seconds(few), seconds(many)) for _ in range(ROUNDS)]
        few_s, many_s = (statistics.median(column) / REQUESTS for column in zip(*pairs, strict=True))
        ratio = many_s / few_s
        is_good = is_good and ratio <= BOUND
        print(
            f"{name:24} {FEW} replicas {few_s * 1e6:.2f} us   {MANY} replicas {many_s * 1e6:.2f} us   "
            f"ratio {ratio:.2f}   bound {BOUND}"
        )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
