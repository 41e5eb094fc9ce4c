"""A real controller on a local cluster in virtual time, with scripted replicas and proxies."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import partial, wraps
from typing import Any

from by_task import by_task
from control_harness import app_spec, spec
from scripted_builder import Script, ScriptedBuilder

from daskserve.client.instance.calls import ControllerCalls
from daskserve.cluster.local.cluster import LocalCluster
from daskserve.cluster.protocols.base import ActorContext, StoreChange, verb, verbs_of
from daskserve.cluster.store.opening import MemoryStore
from daskserve.common.types import (
    ActorAddress,
    ActorKind,
    Envelope,
    Load,
    Location,
    Receive,
    ReplicaState,
    Send,
    WorkerAddress,
    as_rank_info,
)
from daskserve.control.controller import Controller
from daskserve.control.records.records import Record, ReplicaRecord
from daskserve.control.records.storing.encoding import CorruptRecordError, decode
from daskserve.errors import ReplicaStartError
from daskserve.options.http import HTTPOptions
from daskserve.options.specs import ApplicationSpec
from daskserve.options.start_messages import ControllerStart, ProxyStart, ReplicaStart
from daskserve.telemetry.table import MetricSample
from daskserve.testing import run_virtual, wait_until


class ScriptedStore(MemoryStore):
    """A memory store that can be unreachable, and that reports every commit."""

    def __init__(self) -> None:
        super().__init__()
        self.failures = 0
        self.commits = 0
        self.after_commit: Callable[[Mapping[str, bytes | None]], None] | None = None
        #: The last record of each replica that has ever existed.
        self.last_of_replicas: dict[str, bytes] = {}

    async def commit(self, epoch: int, change: StoreChange) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError("the store cannot be reached")
        await super().commit(epoch, change)
        self.commits += 1
        replicas = {key: each for key, each in change.records.items() if key.startswith("replica/") and each}
        self.last_of_replicas.update(replicas)
        if self.after_commit is not None:
            self.after_commit(change.records)

    @property
    def data(self) -> dict[str, bytes]:
        """The stored data, which tests read and damage."""
        return self._records

    def records(self) -> dict[str, Record]:
        """Return all stored records that can be read."""
        return dict(self._readable())

    def _readable(self) -> Iterator[tuple[str, Record]]:
        for key, data in self._records.items():
            try:
                yield key, decode(key, data)
            except CorruptRecordError:
                pass


class CrashingStore(ScriptedStore):
    """Kills the controller's worker right after its n-th commit, before the controller acts on it."""

    stage: Stage

    def __init__(self, crash_at: int) -> None:
        super().__init__()
        self.crash_at = crash_at
        self.epochs: list[int] = []

    async def commit(self, epoch: int, change: StoreChange) -> None:
        await super().commit(epoch, change)
        self.epochs.append(epoch)
        if self.commits == self.crash_at:
            cluster = self.stage.cluster
            (controller,) = [each for each in cluster.actors() if each.name.endswith("/controller")]
            cluster.remove_worker(controller.worker)
            cluster.add_worker()


class ScriptedReplica:
    """A replica without user code; `Stage` defines its behavior."""

    def __init__(self, stage: Stage, context: ActorContext) -> None:
        self._stage = stage
        self._context = context
        self.verbs = verbs_of(self)
        self.message = ReplicaStart.decode(context.spec.payload)
        self.worker = context.worker
        self.user_config = self.message.user_config
        self.concurrency = self.message.concurrency
        self.rank_info = as_rank_info(self.message.rank_info)
        self._reconfigures_since: float | None = None

    @property
    def tag(self) -> str:
        return self.message.replica_tag

    async def start(self) -> Mapping[str, Any]:
        stage = self._stage
        stage.check_written_ahead(self._context.spec.incarnation, self.tag)
        stage.started.append(self.tag)
        await stage.clock.sleep(stage.start_s)
        if stage.start is not None:
            await stage.start(self)
        stage.running[self.tag] = self
        return {"rank_info": self.rank_info}

    @by_task
    async def handle(self, envelope: Envelope, receive: Receive, send: Send) -> Load:
        return Load()

    def samples(self) -> list[MetricSample]:
        return []

    def health(self) -> Mapping[str, Any]:
        facts: dict[str, Any] = {"ongoing": self._stage.ongoing}
        if self._reconfigures_since is not None:
            facts["busy"] = "running reconfigure()", self._stage.clock.now() - self._reconfigures_since
        return facts

    def metrics(self) -> Mapping[str, Any]:
        return {"ongoing": 0, "ended": 0}

    @verb
    async def reconfigure(
        self,
        user_config: bytes | None,
        concurrency: int,
        config: Mapping[str, Any],
        rank_info: Sequence[int],
        patience_s: float,
    ) -> None:
        self._stage.reconfigured.append(self.tag)
        if self._stage.reconfigure is not None:
            self._reconfigures_since = self._stage.clock.now()
            try:
                await self._stage.reconfigure(self)
            finally:
                self._reconfigures_since = None
        self.user_config = user_config
        self.concurrency = concurrency
        self.rank_info = as_rank_info(rank_info)

    async def stop(self, grace_s: float) -> None:
        if self._stage.running.get(self.tag) is self:
            del self._stage.running[self.tag]
        self._stage.stopped.append((self.tag, grace_s))
        await self._stage.clock.sleep(min(grace_s, self._stage.drain_s))


class ScriptedProxy:
    """A proxy that only receives the route table."""

    def __init__(self, stage: Stage, context: ActorContext) -> None:
        self.verbs = verbs_of(self)
        self._stage = stage
        self._cluster: Any = context.cluster
        self.message = ProxyStart.decode(context.spec.payload)
        self.worker = context.worker
        self.routes: Any = None

    async def start(self) -> Mapping[str, Any]:
        if self.worker in self._stage.broken_ports:
            error = self._stage.broken_ports[self.worker]
            if error is None:
                await asyncio.Event().wait()
            else:
                raise error
        await self._cluster.listener.start()
        self._cluster.listener.watch("routes", self._learn)
        self._stage.proxies[self.worker] = self
        port = self.message.options.port or 40000
        return {"port": port, "urls": [f"http://{self.worker}:{port}"]}

    def _learn(self, routes: Any) -> None:
        self.routes = routes

    @verb
    async def wait_for_snapshot(self, epoch: int, counter: int, timeout_s: float) -> None:
        await self._cluster.listener.wait_for_snapshot((epoch, counter), timeout_s)

    @by_task
    async def handle(self, envelope: Envelope, receive: Receive, send: Send) -> Load:
        return Load()

    def samples(self) -> list[MetricSample]:
        return []

    async def stop(self, grace_s: float) -> None:
        if self._stage.proxies.get(self.worker) is self:
            del self._stage.proxies[self.worker]
            self._stage.successors.append((self.worker, set(self._stage.proxies)))
        await self._stage.clock.sleep(min(grace_s, self._stage.drain_s))


class Stage:
    """An instance, the behavior that a test sets for it, and the events that the test reads."""

    def __init__(
        self,
        *,
        workers: int = 3,
        http: HTTPOptions | None = None,
        store: ScriptedStore | None = None,
        opens_with_route: bool = False,
    ) -> None:
        self.store = store or ScriptedStore()
        factories: dict[ActorKind, Any] = {
            ActorKind.CONTROLLER: Controller,
            ActorKind.PROXY: lambda context: ScriptedProxy(self, context),
            ActorKind.REPLICA: lambda context: ScriptedReplica(self, context),
            ActorKind.BUILDER: lambda context: ScriptedBuilder(self.script, context),
        }
        self.script = Script()
        self.cluster = LocalCluster(factories, workers=workers, store=self.store)
        self.clock = self.cluster.clock
        self.http = http or HTTPOptions(location=Location.NO_SERVER)
        #: The id of the instance's start; another id stands for a new cluster on the same store.
        self.start_id = "first"
        self.opens_with_route = opens_with_route
        self.history_bytes = 1 << 20
        self.calls = ControllerCalls(self.cluster.program.connection, self.cluster.instance)
        #: The behavior of replicas in their start and their reconfigure, the durations of both, and of
        #: draining.
        self.start: Callable[[ScriptedReplica], Awaitable[None]] | None = None
        self.reconfigure: Callable[[ScriptedReplica], Awaitable[None]] | None = None
        self.start_s = 0.01
        self.drain_s = 0.0
        #: How many running requests each replica reports to the controller.
        self.ongoing = 0
        #: The error that a proxy on a worker raises when it starts; None: it hangs.
        self.broken_ports: dict[WorkerAddress, Exception | None] = {}
        # What has happened.
        self.made_unwritten: list[str] = []
        self.started: list[str] = []
        self.reconfigured: list[str] = []
        self.stopped: list[tuple[str, float]] = []
        self.running: dict[str, ScriptedReplica] = {}
        self.proxies: dict[WorkerAddress, ScriptedProxy] = {}
        #: The workers of the proxies that stopped, each with the workers whose proxies listened at that time.
        self.successors: list[tuple[WorkerAddress, set[WorkerAddress]]] = []
        self._requests = itertools.count()

    def check_written_ahead(self, incarnation: int, tag: str) -> None:
        """Record a replica that was created before it was in the store; `play` raises the error, as this runs
        in a task.

        The record may have been removed again: a start in flight may arrive after the replica was abandoned.
        """
        key = f"replica/{tag}"
        data = self.store.last_of_replicas.get(key) or self.store.data.get(key)
        record = None if data is None else decode(key, data)
        states = (ReplicaState.STARTING, ReplicaState.RUNNING)
        if (
            not isinstance(record, ReplicaRecord)
            or record.state not in states
            or record.incarnation != incarnation
        ):
            self.made_unwritten.append(f"{tag} with incarnation {incarnation}, while the store has {record}")

    async def open(self) -> ActorAddress:
        message = ControllerStart(
            self.http, None, None, self.start_id, self.opens_with_route, self.history_bytes, {}, None
        )
        return await self.cluster.start(message.encode())

    # asking

    async def call(self, verb: str, **message: Any) -> Any:
        return await self.calls.call(verb, **message)

    async def change(self, verb: str, **message: Any) -> None:
        await self.calls.complete(await self.calls.call(verb, **message))

    def spec(self, tag: str = "b", **fields: Any) -> dict[str, Any]:
        request_id = f"request-{next(self._requests)}"
        return {"spec": spec(tag, **{"request_id": request_id, **fields}).to_plain()}

    async def create(self, tag: str = "b", **fields: Any) -> None:
        await self.change("create_backend", **self.spec(tag, **fields))

    async def deploy(self, tag: str = "b", route: str | None = "/", **fields: Any) -> None:
        await self.change(
            "deploy", **self.spec(tag, **fields), route=route, methods=["GET"], python_methods=[]
        )

    async def deploy_apps(self, *apps: ApplicationSpec) -> dict[str, Any]:
        """Deploy applications and return the answer at once."""
        plain = [each.to_plain() for each in apps]
        answer: dict[str, Any] = await self.call("deploy_applications", apps=plain)
        return answer

    async def run(
        self, name: str = "default", graph: Mapping[str, Iterable[str]] | None = None, **fields: Any
    ) -> None:
        """Deploy an application and wait until it is up."""
        fields = {"request_id": f"request-{next(self._requests)}", **fields}
        app = app_spec(name, graph or {"back": (), "front": ("back",)}, **fields)
        goal = (await self.deploy_apps(app))["goals"][name]
        if goal is not None:
            await self.calls.wait_for_goal(goal, None)

    async def app_status(self, name: str = "default") -> dict[str, Any]:
        found: dict[str, Any] = (await self.call("status"))["applications"][name]
        return found

    async def update(self, tag: str = "b", user_config: bytes | None = None, **config: Any) -> None:
        await self.change(
            "update_backend_config",
            tag=tag,
            config=config,
            user_config=user_config,
            sets_user_config=user_config is not None,
            timeout_s=60.0,
        )

    async def delete(self, tag: str = "b", force: bool = False) -> None:
        await self.change("delete_backend", tag=tag, force=force)

    async def endpoint(self, name: str = "e", route: str | None = "/e", backend: str = "b") -> None:
        await self.change(
            "create_endpoint",
            name=name,
            route=route,
            methods=["GET"],
            backend=backend,
            request_id=f"request-{next(self._requests)}",
        )

    # looking

    async def published(self, key: str) -> Any:
        return (await self.call("fetch", keys=[key]))["values"][key]

    def running_of(self, tag: str = "b") -> list[ScriptedReplica]:
        return [each for each in self.running.values() if each.message.backend_tag == tag]

    def stored(self, kind: str) -> dict[str, Record]:
        return {key: record for key, record in self.store.records().items() if key.startswith(f"{kind}/")}

    def replica_workers(self) -> set[WorkerAddress]:
        return {each.worker for each in self.cluster.actors() if "/replica/" in each.name}

    def controller(self) -> Controller:
        """Return the running controller."""
        entries = (each for host in self.cluster._hosts.values() for each in host.registry.entries.values())
        return next(each.actor for each in entries if isinstance(each.actor, Controller))

    # letting things happen

    async def crash_controller(self) -> ActorAddress:
        """Kill the controller's worker and return the controller that takes over."""
        self.cluster.remove_worker((await self.cluster.program.controller()).worker)
        return await self.cluster.program.controller()

    async def until(self, condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
        return await wait_until(condition, timeout_s=timeout_s, every_s=0.001)


def boom(message: str = "the constructor raised") -> Callable[[ScriptedReplica], Awaitable[None]]:
    async def fail(replica: ScriptedReplica) -> None:
        raise ReplicaStartError(message, user_traceback="Traceback ...")

    return fail


async def hang(replica: ScriptedReplica) -> None:
    await asyncio.Event().wait()


def play(scenario: Callable[[Stage], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Run a scenario in virtual time on a stage whose controller runs."""

    async def main() -> None:
        stage = Stage(**options)
        async with stage.cluster:
            await stage.open()
            await scenario(stage)
        assert not stage.made_unwritten

    run_virtual(main)


def staged(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator for a test that is a scenario: it gets the stage of `play` and its own fixtures."""

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        @wraps(test)
        def run_test(**given: Any) -> None:
            play(partial(test, **given), **options)

        signature = inspect.signature(test)
        others = list(signature.parameters.values())[1:]
        run_test.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run_test

    return decorate
