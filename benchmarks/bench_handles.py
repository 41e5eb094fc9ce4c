"""Python calls, compared with bare connections in the same run.

1. A replica in one worker calls a replica in another, with 100 bytes in each direction: one call at a time,
   and 64 calls in flight; with user code in threads (the default) and with ``event_loop="worker"``. Floor: a
   bare channel between two processes with an echo at its end.
2. This program sends a replica an array of 1 MiB and gets it back. Floor: the same over a bare Dask comm.
3. Three deployments in a chain: each calls the next one with 100 bytes, in another process or in its own;
   with user code on separate event loops (the default) and with ``event_loop="worker"``. Compared with a
   call of one deployment, by the same program in turns.
4. This program sends a replica an array of 100 MiB, different in each call, one way and there and back.
   Floor: one copy of the array to memory that is in use.
5. With ``--python DIR/bin/python``, an environment with Ray Serve (see ``bench_peers.py``): its handle and
   daskserve's in turns, with 64 calls in flight and with the array of 100 MiB; its chain of three, where each
   deployment has a separate process; and its deploys of one and of ten deployments (only with
   ``--case deploys``: it takes minutes), to compare with ``bench_start.py --case ten``.

Run: ``python benchmarks/bench_handles.py [--runs N] [--case calls|chain|arrays|deploys]``. It prints a line
per case, with medians of the runs. ``--case arrays`` takes half a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
from distributed.comm import connect
from distributed.protocol import to_serialize

import daskserve as serve
from daskserve.cluster.dask.launch import start_local_cluster
from daskserve.common.settings import LocalClusterSize

ECHO = Path(__file__).parent / "programs" / "echo_process.py"
RAY_HANDLE = Path(__file__).parent / "peers" / "ray_handle.py"
CALLS = 2000
IN_FLIGHT = 64
#: Calls per case: enough for about a second, because the rate varies within tenths of a second.
CALLS_OF_EACH = 500
ARRAY_CALLS = 100
#: Calls for each median of a chain: few, because other work on the machine changes within seconds.
CHAIN_CALLS = 400
LARGE_BYTES = 100 * 1024 * 1024
#: Calls with a large array for each median, after a few that fill the memory which the processes use again.
LARGE_CALLS, LARGE_WARM_UPS = 15, 3

#: Asks a peer for a measurement by its name, and returns its numbers.
Ask = Callable[[str], list[float]]


class Called:
    """The deployment that is called."""

    async def __call__(self, value: Any) -> Any:
        return value

    async def first(self, array: Any) -> float:
        """Return the array's first element."""
        return float(array[0])


class Caller:
    """Calls another deployment and measures the time."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def _call(self, count: int, took: list[float]) -> None:
        for _ in range(count):
            began = time.perf_counter()
            await self._handle.remote(bytes(100))
            took.append(time.perf_counter() - began)

    async def __call__(self) -> tuple[float, float]:
        """Return the median seconds of a single call, and the calls per second with 64 in flight."""
        await self._call(CALLS // 10, [])
        alone: list[float] = []
        await self._call(CALLS, alone)
        began = time.perf_counter()
        await asyncio.gather(*[self._call(CALLS_OF_EACH, []) for _ in range(IN_FLIGHT)])
        return statistics.median(alone), IN_FLIGHT * CALLS_OF_EACH / (time.perf_counter() - began)


class Link:
    """Calls the next deployment of a chain."""

    def __init__(self, following: Any = None) -> None:
        self._following = following

    async def __call__(self, value: Any) -> Any:
        return value if self._following is None else await self._following.remote(value)


@contextmanager
def echo_process() -> Iterator[str]:
    """Run the echo process of the floors; yield its address."""
    process = subprocess.Popen([sys.executable, str(ECHO)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def bare_channel(address: str) -> tuple[float, float]:
    ended = subprocess.run([sys.executable, str(ECHO), address], capture_output=True, text=True, check=True)
    found = json.loads(ended.stdout)
    return found["alone_s"], found["rate"]


async def bare_comm(address: str, array: Any) -> float:
    """Return the median seconds of an array's round trip over a Dask comm."""
    comm = await connect(address)
    took = []
    for _ in range(ARRAY_CALLS):
        began = time.perf_counter()
        await comm.write({"op": "array", "array": to_serialize(array)})
        answer = await comm.read()
        took.append(time.perf_counter() - began)
        assert answer["array"].nbytes == array.nbytes
    await comm.close()
    return statistics.median(took)


def array_calls(handle: Any, array: Any) -> float:
    took = []
    for _ in range(ARRAY_CALLS):
        began = time.perf_counter()
        answer = handle.remote(array).result()
        took.append(time.perf_counter() - began)
        assert answer.nbytes == array.nbytes
    return statistics.median(took)


def large_calls(array: Any, send: Callable[[Any], float]) -> float:
    """Return the median seconds of a call with a large array; ``send`` returns the first element it finds."""
    took = []
    for number in range(LARGE_WARM_UPS + LARGE_CALLS):
        array[0] = number
        began = time.perf_counter()
        found = send(array)
        took.append(time.perf_counter() - began)
        assert found == number
    return statistics.median(took[LARGE_WARM_UPS:])


@contextmanager
def deployed(config: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the handles of the caller, in one worker, and of the called deployment, in another."""
    cluster, dask = start_local_cluster(LocalClusterSize(2, 2), has_dashboard=False)
    try:
        with serve.start(http_options={"location": "NoServer"}, dask_client=dask) as client:
            one, other = dask.scheduler_info(n_workers=-1)["workers"]
            called = serve.deployment(name="echo", config=config, actor_options={"workers": [other]})(Called)
            caller = serve.deployment(name="caller", config=config, actor_options={"workers": [one]})(Caller)
            application = caller.bind(called.bind())
            yield serve.run(application, route_prefix=None), serve.get_deployment_handle("echo", "default")
            assert {each.worker for each in client.status().replicas("echo")} == {other}
    finally:
        dask.close()
        cluster.close()


def measure_calls(runs: int, address: str) -> None:
    for name, config in (("default", {}), ('event_loop="worker"', {"event_loop": "worker"})):
        with deployed(config) as (caller, _):
            alone, rates, floors = [], [], []
            for _ in range(runs):
                floor_s, floor_rate = bare_channel(address)
                alone_s, rate = caller.remote().result()
                alone.append(alone_s / floor_s)
                rates.append(rate)
                floors.append((floor_s, floor_rate))
        floor_s, floor_rate = (statistics.median(each) for each in zip(*floors, strict=True))
        print(
            f"replica to replica, {name:22} alone {statistics.median(alone):.2f} x the bare channel's "
            f"{floor_s * 1e6:.0f} us;  {IN_FLIGHT} in flight {statistics.median(rates):.0f}/s, "
            f"bare {floor_rate:.0f}/s",
            flush=True,
        )


def measure_peers_deploys(runs: int, ask: Ask) -> None:
    ask("deploys")  # warms up
    took = list(zip(*(ask("deploys") for _ in range(runs)), strict=True))
    for name, found in zip(("side by side", "in a chain"), took[1:], strict=True):
        ratio = statistics.median(ten / one for ten, one in zip(found, took[0], strict=True))
        print(
            f"Ray Serve's deploy of ten {name}: {_range_ms(list(found))}, {ratio:.2f} x one's "
            f"{_range_ms(list(took[0]))}",
            flush=True,
        )


def measure_peers_chain(runs: int, ask: Ask) -> None:
    ask("chain")  # deploys and warms up
    theirs = [ask("chain") for _ in range(runs)]
    alone, three = (statistics.median(each) * 1e6 for each in zip(*theirs, strict=True))
    ratios = [chain / one for one, chain in theirs]
    print(
        f"three deployments in a chain, Ray Serve           {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f}) x one call's {alone:.0f} us: {three:.0f} us",
        flush=True,
    )


def measure_chain(runs: int) -> None:
    cluster, dask = start_local_cluster(LocalClusterSize(2, 2), has_dashboard=False)
    try:
        with serve.start(http_options={"location": "NoServer"}, dask_client=dask):
            one, other = dask.scheduler_info(n_workers=-1)["workers"]
            places = {"alone": [one], "apart": [one, other, one], "together": [one, one, one]}
            for name, config in (("default", {}), ('event_loop="worker"', {"event_loop": "worker"})):
                targets = [
                    serve.RunTarget(_chain(config, *workers), name=place, route_prefix=None)
                    for place, workers in places.items()
                ]
                print(f"three deployments in a chain, {name:19} {_chain_ratios(targets, runs)}", flush=True)
    finally:
        dask.close()
        cluster.close()


def _chain(config: dict[str, Any], *workers: str) -> serve.Application:
    bound = None
    for worker in workers:
        connection = serve.deployment(name="link", config=config, actor_options={"workers": [worker]})(Link)
        bound = connection.bind() if bound is None else connection.bind(bound)
    assert bound is not None
    return bound


def _chain_ratios(targets: Sequence[serve.RunTarget], runs: int) -> str:
    handles = serve.run_many(targets)
    alone: list[float] = []
    ratios: dict[str, list[float]] = {"apart": [], "together": []}
    for _ in range(runs):
        one, apart, together = (_median_call(handle) for handle in handles)
        alone.append(one)
        ratios["apart"].append(apart / one)
        ratios["together"].append(together / one)
    apart_of, together_of = (
        f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})" for found in ratios.values()
    )
    return (
        f"{apart_of} x one call's {statistics.median(alone) * 1e6:.0f} us between processes, "
        f"{together_of} x in one process"
    )


def _median_call(handle: Any) -> float:
    took = []
    for _ in range(CHAIN_CALLS):
        began = time.perf_counter()
        handle.remote(bytes(100)).result()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


@contextmanager
def peer_process(python: str) -> Iterator[Ask]:
    """Run Ray Serve in another environment."""
    command = [python, str(RAY_HANDLE)]
    peer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    to, back = peer.stdin, peer.stdout
    assert to is not None
    assert back is not None

    def ask(name: str) -> list[float]:
        to.write(f"{name}\n")
        to.flush()
        while True:
            line = back.readline()
            if not line:
                raise RuntimeError(f"Ray Serve ended instead of answering {name!r}")
            with suppress(ValueError):  # a warning of Ray's
                return [float(each) for each in line.split()]

    with peer:
        assert back.readline().strip() == "ready"
        yield ask
        to.close()


def measure_peer(runs: int, ask: Ask) -> None:
    with deployed({}) as (caller, _):
        ratios, rates = [], []
        for _ in range(runs):
            theirs = ask("calls")[0]
            ours = caller.remote().result()[1]
            ratios.append(ours / theirs)
            rates.append(theirs)
    print(
        f"{IN_FLIGHT} in flight, compared with Ray Serve's handle, {statistics.median(rates):.0f}/s: "
        f"{statistics.median(ratios):.1f} times ({min(ratios):.1f} to {max(ratios):.1f})",
        flush=True,
    )


def measure_arrays(runs: int, address: str) -> None:
    array = np.arange(1 << 17, dtype=np.float64)
    with deployed({}) as (_, handle):
        ratios, floors = [], []
        for _ in range(runs):
            floor_s = asyncio.run(bare_comm(address, array))
            ratios.append(array_calls(handle, array) / floor_s)
            floors.append(floor_s)
    print(
        f"array of 1 MiB there and back: {statistics.median(ratios):.2f} x the bare comm's "
        f"{statistics.median(floors) * 1e3:.2f} ms",
        flush=True,
    )


def measure_large(runs: int, ask: Ask | None) -> None:
    array = np.random.default_rng(0).random(LARGE_BYTES // 8)
    memory = np.empty_like(array)

    def copy(array: Any) -> float:
        np.copyto(memory, array)
        return float(memory[0])

    with deployed({}) as (_, handle):
        sends: dict[str, Callable[[Any], float]] = {
            "one way": lambda array: float(handle.first.remote(array).result()),
            "there and back": lambda array: float(handle.remote(array).result()[0]),
        }
        floors: list[float] = []
        ours: dict[str, list[float]] = {name: [] for name in sends}
        theirs: dict[str, list[float]] = {name: [] for name in sends}
        for _ in range(runs):
            floors.append(large_calls(array, copy))
            for name, send in sends.items():
                ours[name].append(large_calls(array, send))
            for name, found_s in zip(sends, ask("arrays") if ask else (), strict=False):
                theirs[name].append(found_s)
    print(f"one copy of 100 MiB: {_range_ms(floors)}", flush=True)
    for name, found in ours.items():
        over = statistics.median(each / floor for each, floor in zip(found, floors, strict=True))
        line = f"array of 100 MiB {name:14} {_range_ms(found)}, {over:.2f} x the copy"
        if theirs[name]:
            ratio = statistics.median(a / b for a, b in zip(found, theirs[name], strict=True))
            line += f";  Ray Serve {_range_ms(theirs[name])}: {ratio:.2f} times its time"
        print(line, flush=True)


def _range_ms(seconds: list[float]) -> str:
    low, middle, high = (each(seconds) * 1e3 for each in (min, statistics.median, max))
    return f"{middle:.1f} ms ({low:.1f} to {high:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--python", default="", help="interpreter of an environment with Ray Serve")
    parser.add_argument("--case", choices=["calls", "chain", "arrays", "deploys"], help="only these cases")
    given = parser.parse_args()
    wants = {"calls", "chain", "arrays"} if given.case is None else {given.case}
    if "chain" in wants:
        measure_chain(given.runs)
    with peer_process(given.python) if given.python else nullcontext() as ask:
        if ask and "deploys" in wants:
            measure_peers_deploys(given.runs, ask)
        if ask and "chain" in wants:
            measure_peers_chain(given.runs, ask)
        if ask and "calls" in wants:
            measure_peer(given.runs, ask)
        if "arrays" in wants:
            measure_large(given.runs, ask)
    if wants & {"calls", "arrays"}:
        with echo_process() as address:
            if "calls" in wants:
                measure_calls(given.runs, address)
            if "arrays" in wants:
                measure_arrays(given.runs, address)


if __name__ == "__main__":
    main()
