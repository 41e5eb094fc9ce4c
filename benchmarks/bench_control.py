"""Cost of the control plane as it grows, on the in-process cluster, without a network.

1. tick: one idle iteration of the control loop with 1,000 deployments and 10,000 replicas; bound 5 ms.
2. recovery: from the store's records of this instance to a state that makes decisions; bound 2 s.
3. grow: adding one replica in this instance, compared with an instance of 10 deployments; bound 1.5 times.
4. applications: 1,000 of two deployments each; the last deploy compared with the tenth (bound 1.5 times), the
   status of all (bound 1 s), recovery (bound 2 s), and one call that deploys all of them (bound 2 s).
5. create: the 1,000th backend compared with the 20th, in SQLite: time (bound 1.5 times), records and bytes
   (equal). Two instances create backends in turns, so other work on the machine slows both.

Times are CPU times, except those of 5, which include the waits for the disk.

Run: ``python benchmarks/bench_control.py``. It prints a line per metric and exits with 1 if a bound is
exceeded.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from daskserve.cluster.local.cluster import LocalCluster
from daskserve.cluster.protocols.base import ActorContext, StoreChange
from daskserve.cluster.scheduler.owned_store import OwnedStore
from daskserve.cluster.store.opening import open_store
from daskserve.common.clock import LoopClock
from daskserve.common.types import ActorKind, Location, WorkerInfo
from daskserve.config_file.reading import read
from daskserve.config_file.writing import to_yaml
from daskserve.control.backend import step as backend_state
from daskserve.control.backend.actions import StartReplica
from daskserve.control.backend.inputs import StepInputs
from daskserve.control.controller import Controller
from daskserve.control.decisions import applications as app_decisions
from daskserve.control.decisions import backends as backend_decisions
from daskserve.control.declared.apply import apply
from daskserve.control.declared.building import BATCH
from daskserve.control.declared.plan import completed, planned
from daskserve.control.declared.settling import settled
from daskserve.control.observed.observed import Observed
from daskserve.control.records.declared import Origin
from daskserve.control.records.records import Change
from daskserve.control.records.state import State
from daskserve.control.records.storing import checkpoint
from daskserve.control.records.storing.encoding import encode
from daskserve.control.views import applications as app_views
from daskserve.options.actor import ActorOptions
from daskserve.options.backend import BackendConfig
from daskserve.options.http import HTTPOptions
from daskserve.options.specs import ApplicationSpec, BackendSpec, DeploymentSpec
from daskserve.options.start_messages import ControllerStart

DEPLOYMENTS, REPLICAS_EACH, WORKERS = 1000, 10, 500
TICK_BOUND_S, RECOVERY_BOUND_S, GROWTH_BOUND = 0.005, 2.0, 1.5
APPLICATIONS, STATUS_BOUND_S, READ_BOUND_S, PLAN_BOUND_S = 1000, 1.0, 1.0, 1.0
RUNS = 20


def spec(name: str, replicas: int) -> BackendSpec:
    """Return the arguments of a client's request."""
    return BackendSpec(
        tag=name,
        code=b"code" * 50,
        config=BackendConfig(num_replicas=replicas),
        user_config=None,
        actor_options=ActorOptions(num_cpus=0.01),
        version=None,
        user_version=None,
        prev_version=None,
        env=None,
        request_id=name,
        timeout_s=None,
        progress_timeout_s=None,
        parts=(),
    )


class World:
    """The records of an instance whose replicas all run, produced by the control code."""

    def __init__(self, deployments: int) -> None:
        self.state = State()
        self.rng = random.Random(0)
        workers = [WorkerInfo(f"w{n}", f"h{n}", 8, 1 << 34) for n in range(WORKERS)]
        self.observed = Observed(workers={each.address: each for each in workers})
        self.incarnation = 0
        self.goals = deployments
        for number in range(deployments):
            name = f"d{number:05d}"
            self.state.apply(
                backend_decisions.create_backend(
                    self.state, spec(name, REPLICAS_EACH), goal_id=f"g{number}", now=0.0
                ).change
            )
            self.settle(name)

    def next_goal(self) -> str:
        self.goals += 1
        return f"g{self.goals}"

    def step(self, name: str) -> Change:
        """Run one step of one backend, as the loop does, and return its change."""
        seed = self.rng.getrandbits(64)
        given = StepInputs(self.state, self.observed, 0.0, seed, self.incarnation, frozenset({"w0"}))
        step = backend_state.step(given, self.state.backends[name])
        self.incarnation = step.incarnation
        self.state.apply(step.change)
        self.observed.learn(name, step.notes)
        for action in step.actions:
            if isinstance(action, StartReplica):
                self.observed.ready[action.replica.tag] = {}
        return step.change

    def settle(self, name: str) -> None:
        """Run steps until nothing changes."""
        while self.step(name):
            pass

    def add_replica(self, name: str) -> float:
        """Scale a backend up by one replica and back; return the seconds that scaling up took."""
        before = self.state.backends[name].num_replicas
        took = 0.0
        for wanted in (before + 1, before):
            began = time.process_time()
            outcome = backend_decisions.update_backend_config(
                self.state,
                name,
                BackendConfig(num_replicas=wanted),
                None,
                sets_user_config=False,
                goal_id=self.next_goal(),
                now=0.0,
            )
            self.state.apply(outcome.change)
            self.settle(name)
            took = took or time.process_time() - began
            for tag in list(self.state.replicas):
                if self.state.replicas[tag].state == "STOPPING":
                    self.observed.gone.add(tag)
            self.settle(name)
        return took


async def tick_s(world: World) -> float:
    """Return the median time of an idle loop iteration, in seconds."""
    from daskserve.control.reconcile import TICK_SLICE

    names = sorted(world.state.backends)
    metrics = []
    for start in range(0, min(len(names), RUNS * TICK_SLICE), TICK_SLICE):
        began = time.process_time()
        for name in names[start : start + TICK_SLICE]:
            world.step(name)
        sorted(world.state.workers_in_use())
        metrics.append(time.process_time() - began)
    return statistics.median(metrics)


def recovery_s(world: World) -> float:
    """Return the seconds from reading all records to a state that has decided once."""
    state = world.state
    records = {key: encode(record) for key, record in state.records().items()}
    began = time.process_time()
    restored, corrupt = checkpoint.restore(records)
    assert not corrupt
    fresh = World(0)
    fresh.state = restored
    for name in restored.backends:
        fresh.step(name)
    return time.process_time() - began


def app_spec(number: int) -> ApplicationSpec:
    """Return an application of two deployments: an ingress, and the deployment that it calls."""
    name = f"app{number:05d}"
    back, front = f"{name}/back", f"{name}/front"
    deployments = (
        DeploymentSpec("back", spec(back, 1)),
        DeploymentSpec("front", spec(front, 1), needs=(back,)),
    )
    return ApplicationSpec(name, f"/{name}", deployments, name, None)


def deploy_apps(world: World, numbers: Sequence[int]) -> float:
    """Deploy applications in one call and settle them; return the seconds that this took."""
    specs = [app_spec(number) for number in numbers]
    began = time.process_time()
    deployed = app_decisions.deploy(world.state, specs, new_goal=world.next_goal, now=0.0)
    world.state.apply(deployed.change)
    for tag in (*deployed.tags, *deployed.tags):
        world.settle(tag)
    took = time.process_time() - began
    assert all(app.goal is None for app in world.state.apps)
    return took


def status_s(world: World) -> float:
    """Return the seconds that the status of all applications takes."""
    began = time.process_time()
    found = [app_views.application_status(world.state, world.observed, app, 0.0) for app in world.state.apps]
    assert {each["status"] for each in found} == {"RUNNING"}
    return time.process_time() - began


def file_of(numbers: Sequence[int]) -> dict[str, Any]:
    """Return the configuration of applications."""
    names = [f"app{number:05d}" for number in numbers]
    return {
        "applications": [
            {"name": name, "import_path": "shop:app", "route_prefix": f"/{name}"} for name in names
        ]
    }


def read_s(numbers: Sequence[int]) -> float:
    """Return the seconds that it takes to read and check applications of a file of YAML, with references."""
    parts = {
        "args": {"region": "${REGION:-eu}"},
        "runtime_env": {"env_vars": {"TOKEN": "${TOKEN}"}},
        "deployments": [{"name": "Model", "num_replicas": 2, "user_config": {"index": "${INDEX:-latest}"}}],
    }
    text = to_yaml({"applications": [{**each, **parts} for each in file_of(numbers)["applications"]]})
    began = time.process_time()
    found = read(text)
    assert len(found.config.applications) == len(numbers)
    return time.process_time() - began


def plan_s(world: World, numbers: Sequence[int]) -> float:
    """Return the seconds that the plan of built applications takes."""
    built = {each.name: each for each in map(app_spec, numbers)}
    began = time.process_time()
    apps = {name: planned(world.state, name, each) for name, each in built.items()}
    found = completed(world.state, file_of(numbers), apps, merges=False)
    assert set(found["applications"]) == built.keys()
    return time.process_time() - began


def declare_apps(world: World, numbers: Sequence[int]) -> float:
    """Deploy applications from one file and settle them; return the seconds that this took."""
    specs = {each.name: each for each in map(app_spec, numbers)}
    began = time.process_time()
    applied = apply(
        world.state,
        file_of(numbers),
        merges=False,
        expected=None,
        request_id="",
        origin=Origin(),
        now=0.0,
        new_goal=world.next_goal,
    )
    world.state.apply(applied.change)
    names = list(specs)
    for some in (names[start : start + BATCH] for start in range(0, len(names), BATCH)):
        built = {name: (world.state.declared.configs[name], specs[name]) for name in some}
        found = settled(world.state, built, {}, new_goal=world.next_goal, now=0.0)
        world.state.apply(found.change)
        for tag in (*found.tags, *found.tags):
            world.settle(tag)
    took = time.process_time() - began
    assert all(app.goal is None and app.is_declared for app in world.state.apps)
    return took


class CountingStore:
    """A store that counts committed records and bytes."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.written: list[tuple[int, int]] = []

    async def load(self) -> Mapping[str, bytes]:
        found: Mapping[str, bytes] = await self._store.load()
        return found

    async def commit(self, epoch: int, change: StoreChange) -> None:
        values = [value or b"" for value in change.records.values()]
        self.written.append((len(values), sum(map(len, values))))
        await self._store.commit(epoch, change)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class Empty:
    """An actor that does nothing."""

    def __init__(self, context: ActorContext) -> None:
        self.verbs: dict[str, Any] = {}

    async def start(self) -> dict[str, Any]:
        return {}

    def samples(self) -> list[Any]:
        return []

    async def stop(self, grace_s: float) -> None:
        pass


class Instance:
    """An instance on a separate event loop, which runs only while the instance creates backends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runner = asyncio.Runner()
        self._created = 0

    def __enter__(self) -> Instance:
        self._runner.__enter__()
        self._runner.run(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._close())
        self._runner.close()

    async def _open(self) -> None:
        url = f"sqlite:///{self._folder / 'store.db'}"
        self._inner = OwnedStore(open_store(url, "bench"), "bench.1", LoopClock())  # type: ignore[arg-type]
        await self._inner.open()
        await self._inner.begin()
        self._store = CountingStore(self._inner)
        factories = {ActorKind.CONTROLLER: Controller, ActorKind.REPLICA: Empty, ActorKind.PROXY: Empty}
        workers = [WorkerInfo(f"w{n}", f"h{n}", 64, 1 << 36) for n in range(4)]
        self._cluster = LocalCluster(factories, workers=workers, store=self._store)  # type: ignore[arg-type]
        await self._cluster.__aenter__()
        await self._cluster.start(
            ControllerStart(
                tracing={},
                http=HTTPOptions(location=Location.NO_SERVER),
                middlewares=None,
                callback=None,
                start_id="",
                opens_with_route=False,
                history_bytes=1 << 28,
                logging=None,
            ).encode()
        )
        self._view = self._cluster.process("w0")
        self._controller = await self._view.controller()

    async def _close(self) -> None:
        await self._cluster.__aexit__(None, None, None)
        await self._inner.close()

    def create(self) -> tuple[float, int, int]:
        """Create a backend; return the seconds, the records and the bytes that this takes."""
        return self._runner.run(self._create())

    async def _create(self) -> tuple[float, int, int]:
        message = spec(f"b{self._created:04d}", 1).to_plain()
        self._created += 1
        self._store.written.clear()
        began = time.perf_counter()
        answer = await self._view.call(self._controller, "create_backend", spec=message)
        await self._view.call(self._controller, "wait_for_goal", goal_id=answer["goal"], timeout_s=30.0)
        took = time.perf_counter() - began
        written = self._store.written
        return took, sum(each[0] for each in written), sum(each[1] for each in written)


def creations(folder: Path) -> list[tuple[tuple[float, int, int], tuple[float, int, int]]]:
    """Return the durations of creations in an instance of 1,000 backends and in one of 10, in turns."""
    for name in ("large", "small"):
        (folder / name).mkdir()
    with Instance(folder / "large") as large, Instance(folder / "small") as small:
        for _ in range(DEPLOYMENTS - RUNS):
            large.create()
        for _ in range(10):
            small.create()
        return [(large.create(), small.create()) for _ in range(RUNS)]


def show_file(apps: World, show: Callable[[str, str, bool, str], None]) -> None:
    """Print the times of a configuration file with the applications of an instance."""
    numbers = range(APPLICATIONS)
    taken = statistics.median(read_s(numbers) for _ in range(3))
    show("their file: reading it", f"{taken:.2f} s", taken < READ_BOUND_S, "1 s")
    planned = statistics.median(plan_s(apps, numbers) for _ in range(3))
    show("their file: the plan", f"{planned:.2f} s", planned < PLAN_BOUND_S, "1 s")
    declared = World(0)
    at_once = declare_apps(declared, numbers)
    show("their file: the deploy", f"{at_once:.2f} s", at_once < RECOVERY_BOUND_S, "2 s")
    recovery = statistics.median(recovery_s(declared) for _ in range(3))
    show("their file: the recovery", f"{recovery:.2f} s", recovery < RECOVERY_BOUND_S, "2 s")


def main() -> int:
    is_good = True

    def show(name: str, value: str, has_held: bool, bound: str) -> None:
        nonlocal is_good
        is_good &= has_held
        print(f"{name:42} {value:38} bound {bound}{'' if has_held else '   EXCEEDED'}", flush=True)

    large, small = World(DEPLOYMENTS), World(10)
    size = f"{len(large.state.backends)} deployments, {len(large.state.replicas)} replicas"
    print(size)
    tick = asyncio.run(tick_s(large))
    show("an idle loop iteration", f"{tick * 1e3:.2f} ms", tick < TICK_BOUND_S, "5 ms")
    recovery = statistics.median(recovery_s(large) for _ in range(3))
    show("recovery from the store's records", f"{recovery:.2f} s", recovery < RECOVERY_BOUND_S, "2 s")
    pairs = [(large.add_replica("d00500"), small.add_replica("d00005")) for _ in range(RUNS)]
    here, there = (statistics.median(column) for column in zip(*pairs, strict=True))
    show(
        "one more replica, large vs. small",
        f"{here * 1e3:.2f} ms, {there * 1e3:.2f} ms: {here / there:.2f} times",
        here / there <= GROWTH_BOUND,
        f"{GROWTH_BOUND} times",
    )
    apps = World(0)
    deploys = [deploy_apps(apps, [number]) for number in range(APPLICATIONS)]
    late, early = statistics.median(deploys[-RUNS:]), statistics.median(deploys[RUNS : 2 * RUNS])
    show(
        "the 1,000th application vs. the 20th",
        f"{late * 1e3:.2f} ms, {early * 1e3:.2f} ms: {late / early:.2f} times",
        late / early <= GROWTH_BOUND,
        f"{GROWTH_BOUND} times",
    )
    listed = statistics.median(status_s(apps) for _ in range(3))
    show("the status of 1,000 applications", f"{listed:.2f} s", listed < STATUS_BOUND_S, "1 s")
    recovery = statistics.median(recovery_s(apps) for _ in range(3))
    show("their recovery", f"{recovery:.2f} s", recovery < RECOVERY_BOUND_S, "2 s")
    at_once = deploy_apps(World(0), range(APPLICATIONS))
    show("their deploy by one call", f"{at_once:.2f} s", at_once < RECOVERY_BOUND_S, "2 s")
    show_file(apps, show)
    with tempfile.TemporaryDirectory() as folder:
        made = creations(Path(folder))
    late, early = (statistics.median(each[0] for each in column) for column in zip(*made, strict=True))
    show(
        "the 1,000th backend vs. the 20th",
        f"{late * 1e3:.1f} ms, {early * 1e3:.1f} ms: {late / early:.2f} times",
        late / early <= GROWTH_BOUND,
        f"{GROWTH_BOUND} times",
    )
    (_, records, size_bytes), (_, few_records, few_bytes) = made[-1]
    show("records it writes", f"{records}, {few_records}", records == few_records, "equal")
    is_equal = abs(size_bytes - few_bytes) <= 16
    show("bytes it writes", f"{size_bytes}, {few_bytes}", is_equal, "equal except for digits")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
