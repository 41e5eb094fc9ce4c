"""One instance in virtual time: operations, faults, and the invariants that must hold.

Every method is synchronous: it does something and lets some time pass. `Simulation.rest` ends all faults,
waits until the instance is at rest, and reports what is wrong then.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from controller_starts import controller_start
from reference_model import Wanted
from scripted_actors import Script, ScriptedProxy, ScriptedReplica
from simulated_cluster import LATE_S, SimulatedCluster, SimulatedStore, delivery
from witness import Call, Witness, listing

from daskserve.client.instance.calls import ControllerCalls
from daskserve.cluster.protocols.base import ActorContext
from daskserve.cluster.protocols.usage import UsageReport
from daskserve.common.types import ActorAddress, ActorKind, Location, ReplicaState, WorkerInfo
from daskserve.control.controller import Controller
from daskserve.control.placement.placement import capacity
from daskserve.control.records.config_ids import is_pausing
from daskserve.control.records.proxy import ProxyRecord
from daskserve.control.records.records import (
    BackendRecord,
    CodeRecord,
    EndpointRecord,
    GoalRecord,
    GoalState,
    ReplicaRecord,
)
from daskserve.control.records.revisions import RevisionRecord
from daskserve.data.caller.routing.load_reports import LoadReports
from daskserve.errors import ClosedError, ServeError
from daskserve.testing import VirtualTimeLoop

BACKENDS = ("a", "b", "d", "x/a", "x/d")
ENDPOINTS = ("d", "e", "f", "a", "b", "x/a", "x/d")
#: Timeout of constructors.
START_S = 8.0
#: Within this time, a replica has started, was reconfigured or has drained, or has failed.
WORK_S = 30.0
#: How long the replicas of a worker may still fail after the worker's fault has ended.
ERROR_S = 20.0
#: Time from the end of the last fault within which everything must be at rest, goals included.
REST_S = 150.0
#: A goal ends within this time after its timeout, if its controller lives.
GOAL_MARGIN_S = 10.0
#: A call is answered within this time, if its controller lives.
ANSWER_S = 40.0
#: How long the instance must stay at rest.
STAY_S = 7.0
#: Number of replicas that may move to better workers before an instance is at rest.
MOST_MOVES = 20
#: Time without a change under constant load, delays included, after which an autoscaler is settled.
SETTLED_S = 15.0


class UnexpectedErrors(logging.Handler):
    """Reports errors that daskserve logs and survives, unless they are ones that faults explain."""

    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__(logging.ERROR)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, (ServeError, OSError)):
            self._report(f"{record.getMessage()}: {error!r}")


@dataclass
class Queue:
    """Waiting requests of one backend, in the form that `LoadReports` reads."""

    waiting: int = 0
    in_flight: int = 0
    is_autoscaled: bool = True
    is_starving: bool = False
    versions: None = None


class Simulation:
    """See the module.

    Parameters
    ----------
    seed : int
        Seed of all randomness: names, delays, losses.
    latency_s : float
        Maximum latency between two processes, and to the store; each message takes a random share of it.
    has_nannies : bool
        Whether workers that are killed on purpose restart, at another address.
    witness
        The class of the witness.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        workers: int = 3,
        location: str = "NoServer",
        latency_s: float = 0.0,
        has_nannies: bool = True,
        witness: type[Witness] = Witness,
    ) -> None:
        self.rng = random.Random(seed)
        self.latency_s = latency_s
        self.has_nannies = has_nannies
        self.loop = VirtualTimeLoop()
        self.runner = asyncio.Runner(loop_factory=lambda: self.loop)
        self.script = Script()
        self.store = SimulatedStore()
        self.store.delay_s = self._delay
        self.troubled: dict[str, float] = {}
        self.calls: list[Call] = []
        self.goal_waits: list[asyncio.Task[None]] = []
        self.seen: list[tuple[int, int]] = []
        self.received: dict[str, Any] = {}
        self.location = Location(location)
        self.request_count = 0
        #: Waiting requests in the program's router.
        self.queues = {tag: Queue() for tag in BACKENDS}
        self.loaded_at = float("-inf")
        self.witness = witness(
            now=self.loop.time,
            is_excused=self._is_excused,
            is_serving=self._is_serving,
            blamed_at=self.script.blamed.get,
            has_at=self._has_at,
        )
        self.store.witness = self.witness
        self.disturbed_at = 0.0
        self.known_epoch = 0
        self.run(self._open(workers))
        self.unexpected = UnexpectedErrors(self.witness.report)
        logging.getLogger("daskserve").addHandler(self.unexpected)

    def _delay(self) -> float:
        return self.rng.random() * self.latency_s if self.latency_s else 0.0

    async def _open(self, workers: int) -> None:
        factories: dict[ActorKind, Any] = {
            ActorKind.CONTROLLER: Controller,
            ActorKind.PROXY: ScriptedProxy,
            ActorKind.REPLICA: lambda context: ScriptedReplica(self.script, context),
        }
        self.cluster = SimulatedCluster(
            factories, store=self.store, workers=[], rng=self.rng, latency_s=self._delay
        )
        self.cluster.has_nannies = self.has_nannies
        self.cluster.on_cut = self.witness.report
        self.script.on_start = self._check_written_ahead
        publish = self.cluster.topic.publish
        self.cluster.topic.publish = lambda message: self._intercept(publish, message)  # type: ignore[method-assign]
        for _ in range(workers):
            self._add_worker()
        message = controller_start(self.location)
        self.reports = LoadReports(
            cast(Any, self.cluster.program), self.cluster.program.clock, cast(Any, self.queues)
        )
        self.client = ControllerCalls(self.cluster.program.connection, "local")
        listener = self.cluster.program.listener
        await listener.start()
        keys = [f"backend/{tag}" for tag in BACKENDS] + [f"endpoint/{name}" for name in ENDPOINTS]
        for key in (*keys, "routes"):
            listener.watch(key, lambda value, key=key: self._receive(key, value))
        await self.cluster.start(message.encode())
        self.reports.report_soon(is_urgent=False)

    def run(self, coroutine: Any) -> Any:
        return self.runner.run(coroutine)

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.run(asyncio.sleep(seconds))
        self.check()

    def check(self) -> None:
        """Raise an error if any invariant was violated so far."""
        self._record_snapshot()
        self._check_timeouts()
        if self.witness.violations:
            raise AssertionError(listing(self.witness.violations))

    def _check_timeouts(self) -> None:
        """Check that goals end in time and calls are answered, unless faults prevent it."""
        now = self.loop.time()
        if self.cluster.epoch != self.known_epoch or now < self.store.unreachable_until:
            self.known_epoch = self.cluster.epoch
            self.disturbed_at = max(now, self.store.unreachable_until)
        for goal in self.witness.of(GoalRecord):
            if goal.state is GoalState.PENDING and goal.limit_s is not None:
                since = max(self.witness.goals[goal.goal_id].opened_at, self.disturbed_at)
                limit_s = goal.limit_s
                if goal.timeout_s is None:  # a replica that is at work moves before its own limit
                    since = max([since, *self.witness.moved_at.values()])
                    limit_s += WORK_S
                is_deleting = self.witness.is_deleting(goal)
                if now - since > limit_s + GOAL_MARGIN_S and not is_deleting:
                    self.witness.report(f"{goal} hangs since {since:.3f} s")
        for call in self.calls:
            since = max(call.begun_at, self.disturbed_at)
            is_waiting = call.task is not None and not call.task.done() and not call.is_to_old
            if is_waiting and now - since > ANSWER_S:
                self.witness.report(f"{call} has no answer since {since:.3f} s")

    def close(self) -> None:
        try:
            self.run(self._close())
        finally:
            self.runner.close()
            logging.getLogger("daskserve").removeHandler(self.unexpected)

    async def _close(self) -> None:
        self.reports.close()
        for worker in self._workers():
            self.cluster.suspend_worker(worker.address, is_suspended=False)
        tasks = [call.task for call in self.calls if call.task is not None] + self.goal_waits
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.cluster.close()

    # ---- requests

    def request_id(self) -> str:
        self.request_count += 1
        return f"request-{self.request_count}"

    def call(self, verb: str, message: Mapping[str, Any], *, seconds: float, controller: Any = None) -> Call:
        """Start a call in the background and let some time pass."""
        call = self.witness.begin(verb, message)
        call.is_to_old = controller is not None
        self.calls.append(call)

        async def carry_out() -> None:
            try:
                if controller is None:
                    answer = await self.client.call(verb, **message)
                else:
                    answer = await self.cluster.program.call(controller, verb, **message)
            except (ServeError, OSError) as error:
                self.witness.failed(call, error)
            else:
                self.witness.acknowledged(call, answer)
                if answer.get("snapshot") is not None:
                    self._check_received(call)
                for goal in (answer.get("goal"), *answer.get("goals", {}).values()):
                    if goal is not None:
                        self.goal_waits.append(asyncio.create_task(self._wait_for_goal(call, goal)))

        async def begin() -> None:
            call.task = asyncio.create_task(carry_out())

        self.run(begin())
        self.advance(seconds)
        return call

    def _check_received(self, call: Call) -> None:
        """Check that every reachable proxy uses the change when the call returns."""
        allowed = [_routes(each) for each in self.witness.history[call.effect_at :]]
        for address in self.cluster.actors():
            if "/proxy/" in address.name and self.cluster.entry_is_ready(address):
                proxy = cast(ScriptedProxy, self.cluster.actor(address))
                routes = (proxy.routes or {}).items()
                heard = {route: each["endpoint"] for route, each in routes if not each.get("pending")}
                is_old = proxy.started_at < call.begun_at
                if is_old and not self._is_troubled(address.worker) and heard not in allowed:
                    self.witness.report(f"{call} returned, and {address} has {heard} of {allowed}")

    async def _wait_for_goal(self, call: Call, goal_id: str) -> None:
        error: BaseException | None = None
        try:
            await self.client.wait_for_goal(goal_id, None)
        except ClosedError:
            return  # the cluster of the call has ended
        except (ServeError, OSError) as raised:
            error = raised
        record = self.witness.records.get(f"goal/{goal_id}")
        state = record.state if isinstance(record, GoalRecord) else None
        if error is None and state is not GoalState.DONE:
            self.witness.report(f"{call} is reported as done, but its goal is {state}")
        # An unreachable controller reveals nothing about the goal.
        if error is not None and state is not GoalState.FAILED and not getattr(error, "is_retryable", False):
            self.witness.report(f"{call} is reported as failed ({error!r}), and its goal is {state}")

    def repeat(self, index: int, *, seconds: float) -> None:
        """Repeat a call with the same request id."""
        if self.calls:
            call = self.calls[-1 - index % min(4, len(self.calls))]
            self.call(call.verb, call.message, seconds=seconds)

    def cancel_call(self, index: int) -> None:
        """Cancel a caller in the middle of its call."""
        waiting = [call for call in self.calls if call.task is not None and not call.task.done()]
        if waiting:
            task = waiting[index % len(waiting)].task
            assert task is not None
            task.cancel()
            self.advance(0.0)

    def set_load(self, tag: str, waiting: int) -> None:
        """Set the number of waiting requests of a backend."""
        self.queues[tag].waiting = waiting
        self.loaded_at = self.loop.time()
        self._inside(lambda: self.reports.report_soon(is_urgent=waiting > 0))

    # ---- workers

    def _workers(self) -> list[WorkerInfo]:
        return self.cluster.workers()

    def _worker(self, index: int) -> str | None:
        addresses = sorted(each.address for each in self._workers())
        return addresses[index % len(addresses)] if addresses else None

    def _add_worker(self, **fields: Any) -> WorkerInfo:
        number = self.cluster._worker_count
        host = f"10.0.0.{1 + number % 2}"
        return self.cluster.add_worker(**{"host": host, "is_head": number % 2 == 0, **fields})

    def add_worker(self) -> None:
        if len(self._workers()) < 6:
            self._inside(self._add_worker)

    def _inside(self, function: Callable[[], Any]) -> Any:
        """Call a function on the event loop."""

        async def do() -> Any:
            return function()

        return self.run(do())

    def _trouble(self, worker: str) -> None:
        self.troubled[worker] = self.loop.time()

    def harm_worker(self, index: int, kind: str) -> None:
        """``kill``, ``restart`` (at the same address), ``suspend``, ``retire`` or ``disconnect`` a worker."""
        worker = self._worker(index)
        if worker is not None:
            self._inside(lambda: self._harm(worker, kind))

    def _harm(self, worker: str, kind: str) -> None:
        is_last = [each.address for each in self._awake() if not each.is_retiring] == [worker]
        self._trouble(worker)
        controller = self._controller()
        if controller is not None and controller.worker == worker:
            self.disturbed_at = (
                self.loop.time() + 5.0
            )  # until the loss is detected and the controller replaced
        if kind in ("kill", "restart"):
            self._kill(worker, rejoins=kind == "restart" or is_last)
        elif kind == "disconnect":
            self.cluster.break_connections(worker)
        elif is_last:
            pass  # a cluster without a working worker tests nothing
        elif kind == "suspend":
            self.cluster.suspend_worker(worker)
        elif kind == "retire":
            self.cluster.retire_worker(worker)

    def _awake(self) -> list[WorkerInfo]:
        return [each for each in self._workers() if not self.cluster.is_suspended(each.address)]

    def _kill(self, worker: str, *, rejoins: bool) -> None:
        (info,) = [each for each in self._workers() if each.address == worker]
        self.cluster.remove_worker(worker)
        if rejoins:
            self.cluster.add_worker(replace(info, is_available=True, is_retiring=False))

    def resume_worker(self, index: int) -> None:
        stopped = [each.address for each in self._workers() if self.cluster.is_suspended(each.address)]
        if stopped:
            worker = sorted(stopped)[index % len(stopped)]
            self._trouble(worker)
            self._inside(lambda: self.cluster.suspend_worker(worker, is_suspended=False))

    # ---- controllers

    def _controller(self) -> ActorAddress | None:
        return self.cluster.entry.controller

    def harm_controller(self, kind: str) -> None:
        """``kill``, ``restart`` or ``suspend`` the controller's worker."""
        controller = self._controller()
        if controller is not None:
            self._inside(lambda: self._harm(controller.worker, kind))

    def harm_controller_after(self, commits: int, kind: str) -> None:
        """Harm the controller after it commits this many more changes, before it acts on the last one."""

        def happen(epoch: int) -> None:
            for address in self.cluster.actors():
                if (address.name, address.incarnation) == ("local/controller", epoch):
                    self._harm(address.worker, kind)

        self.store.after_commit, self.store.commits_left = happen, commits

    def restart_cluster(self) -> None:
        """Lose the scheduler and all workers, and start a new cluster with the same addresses and store."""

        async def end() -> None:
            self.reports.close()
            for worker in self._workers():
                self._trouble(worker.address)
                self.cluster._hosts[worker.address].process.kill()
            self.cluster.entry.is_ending = True
            await self.cluster.close()

        workers = len(self._workers())
        self.store.after_commit = None
        self.store.unreachable_until = 0.0
        self.run(end())
        self.seen.clear()
        self.run(self._open(workers))

    def call_old_controller(
        self, index: int, verb: str, message: Mapping[str, Any], *, seconds: float
    ) -> None:
        """Call an older controller, like a client that does not know the newest one."""
        old = [
            each
            for each in self.cluster.actors()
            if each.name == "local/controller" and each != self._controller()
        ]
        if old:
            self.call(verb, message, seconds=seconds, controller=old[index % len(old)])

    # ---- replicas and proxies

    def _replica(self, index: int) -> ActorAddress | None:
        found = sorted(
            (each for each in self.cluster.actors() if "/replica/" in each.name), key=lambda each: each.name
        )
        return found[index % len(found)] if found else None

    def fail_checks(self, index: int) -> None:
        """Let the health checks of a replica fail from now on."""
        address = self._replica(index)
        if address is not None:
            tag = address.name.partition("/replica/")[2]
            self.script.sick.add(tag)
            self.script.spoiled.add(tag)

    def vanish(self, index: int) -> None:
        """Remove a replica or a proxy from its worker silently."""
        found = sorted(
            (each for each in self.cluster.actors() if "/controller" not in each.name),
            key=lambda each: each.name,
        )
        if found:
            address = found[index % len(found)]
            self.script.spoiled.add(address.name.partition("/replica/")[2])
            self.cluster.drop_actor(address)

    # ---- the store and updates

    def lose_store(self, seconds: float) -> None:
        self.store.unreachable_until = self.loop.time() + seconds

    def lose_answers(self, commits: int) -> None:
        self.store.lost_answers = commits

    def deliver(self, kind: str) -> None:
        self.cluster.topic.deliver = delivery(kind, self.rng)

    def _intercept(self, publish: Callable[[Any], None], message: Any) -> None:
        """Check every published update."""
        if message.get("kind") == "update" and message["epoch"] == self.cluster.epoch:
            for key, is_inline, value in message["changes"]:
                if key.startswith("backend/") and is_inline and value is not None:
                    self._check_published(message, key.removeprefix("backend/"), value)
        publish(message)

    def _check_published(self, message: Any, tag: str, value: Any) -> None:
        published = {replica for replica, _, _ in value["replicas"]}
        if published - self.witness.ever_running:
            self.witness.report(f"{tag} was published with replicas that never ran: {value}")
        backend = self.witness.backend(tag)
        running = {
            each.tag
            for each in self.witness.replicas(tag)
            if each.state is ReplicaState.RUNNING and not (backend and is_pausing(backend, each))
        }
        if message["counter"] == 1 and published != running:
            self.witness.report(f"a new controller published {published} of {tag}, running are {running}")

    def _receive(self, key: str, value: Any) -> None:
        self.received[key] = value
        self._record_snapshot()

    def _record_snapshot(self) -> None:
        snapshot = self.cluster.program.listener.snapshot_id
        if self.seen and snapshot < self.seen[-1]:
            self.witness.report(f"the listener went back from {self.seen[-1]} to {snapshot}")
        if not self.seen or snapshot != self.seen[-1]:
            self.seen.append(snapshot)

    # ---- callbacks of the witness

    def _is_troubled(self, worker: str | None) -> bool:
        if worker is None:
            return False
        info = {each.address: each for each in self._workers()}.get(worker)
        if info is None or info.is_retiring or self.cluster.is_suspended(worker):
            return True
        return self.loop.time() - self.troubled.get(worker, -ERROR_S) < ERROR_S

    def _is_excused(self, replica: ReplicaRecord) -> bool:
        is_dead = not self.cluster.entry_is_ready(replica.address("local"))
        workers = (replica.worker, *replica.bundle_workers)
        return is_dead or replica.tag in self.script.spoiled or any(map(self._is_troubled, workers))

    def _has_at(self, worker: str) -> Mapping[str, float]:
        return next((capacity(each) for each in self._workers() if each.address == worker), {})

    def _is_serving(self, replica: ReplicaRecord) -> bool:
        is_ready = self.cluster.entry_is_ready(replica.address("local"))
        return is_ready or replica.tag in self.script.spoiled or self._is_troubled(replica.worker)

    def _check_written_ahead(self, context: ActorContext) -> None:
        """Check that the store knows a replica before it is created."""
        tag = context.spec.name.partition("/replica/")[2]
        if self.witness.incarnations.get(context.spec.incarnation) != tag:
            self.witness.report(f"{tag} was created, but is not in the store")
        record = self.witness.records.get(f"replica/{tag}")
        if isinstance(record, ReplicaRecord) and record.state is ReplicaState.RUNNING:
            self.witness.report(f"{tag} is created, but routers already have it as running")

    # ---- at rest

    def rest(self) -> None:
        """End all faults and wait until the instance is at rest; raise an error if anything is wrong then."""
        self._inside(self._heal)
        self.advance(LATE_S)  # late updates arrive
        waited_s, pause_s = LATE_S, 0.5
        while problems := self.problems():
            if waited_s > REST_S:
                raise AssertionError(f"not at rest after {REST_S:g} s:{listing(problems)}")
            self.advance(pause_s)
            waited_s += pause_s
            pause_s = min(8.0, pause_s * 2)
        moved = False
        for _ in range(MOST_MOVES):
            commits, moves = self.store.commits, self._moves()
            self.advance(STAY_S)
            moved, was_moving = self._moves() != moves, moved
            if not moved and not was_moving:
                break
        problems = self.problems()
        if moved or problems or self.store.commits != commits:
            written = self.store.commits - commits
            raise AssertionError(f"the rest did not last: {written} changes;{listing(problems)}")
        # Failures up to now have no effect any more, unless they recur.
        self.witness.open_calls.clear()
        self.goal_waits.clear()

    def _moves(self) -> int:
        """Return how many replicas the controller has moved to better workers."""
        (address,) = [each for each in self.cluster.actors() if each.name.endswith("/controller")]
        samples = self.cluster.actor(address).samples()
        return next(int(value) for name, _, value in samples if name == "replica_moves")

    def _heal(self) -> None:
        self.script.clear()
        self.store.unreachable_until = 0.0
        self.store.lost_answers = 0
        self.store.after_commit = None
        self.cluster.topic.deliver = delivery("good", self.rng)
        for worker in self._workers():
            if self.cluster.is_suspended(worker.address):
                self._trouble(worker.address)
                self.cluster.suspend_worker(worker.address, is_suspended=False)
        roomy = [each for each in self._workers() if each.threads >= 16 and not each.is_retiring]
        for _ in range(3 - len(roomy)):
            roomy.append(self._add_worker(threads=16, resources={"GPU": 8.0}))
        while len({each.host for each in roomy}) < 2:
            roomy.append(self._add_worker(threads=16, resources={"GPU": 8.0}))

    def problems(self) -> list[str]:
        """Return everything that is wrong at rest."""
        return [
            *self._unfinished(),
            *self.witness.unsettled(),
            *self._wrong_replicas(),
            *self._wrong_actors(),
            *self._wrong_updates(),
        ]

    def _unfinished(self) -> Iterator[str]:
        if self._controller() is None:
            yield "there is no controller"
        for call in self.calls:
            if call.task is not None and not call.task.done():
                yield f"{call} has no answer"
        for task in self.goal_waits:
            if not task.done():
                yield "a client still waits for a goal"
            elif not task.cancelled() and task.exception() is not None:
                yield f"waiting for a goal failed: {task.exception()!r}"
        for goal in self.witness.of(GoalRecord):
            if goal.state is GoalState.PENDING:
                yield f"{goal} is pending"
        if self.loop.time() - max(self.witness.scaled_at, self.loaded_at) < SETTLED_S:
            yield "an autoscaler may still change something"
        for worker in self._workers():
            if worker.is_retiring:
                yield f"worker {worker.address} has not left"

    def _wrong_replicas(self) -> Iterator[str]:
        codes = {each.name: each for each in self.witness.of(CodeRecord)}
        wanted_codes = {
            code
            for each in self.witness.of(RevisionRecord)
            if each.is_complete
            for code in each.codes.values()
        }
        for backend in self.witness.of(BackendRecord):
            wanted_codes.add(backend.code_key)
            replicas = self.witness.replicas(backend.tag)
            if backend.is_deleting or len(replicas) != backend.num_replicas:
                yield f"{backend} has {replicas}"
            if sorted(each.rank[0] for each in replicas if each.rank) != list(range(len(replicas))):
                yield f"the ranks of {backend.tag} have gaps: {replicas}"
            for replica in replicas:
                if replica.state is not ReplicaState.RUNNING or replica.version != backend.version:
                    yield f"{replica} of {backend}"
                    continue
                yield from self._wrong_replica(backend, replica, codes[backend.code_key])
        if set(codes) != wanted_codes:
            yield f"there are the codes {set(codes)}, wanted are {wanted_codes}"

    def _wrong_replica(
        self, backend: BackendRecord, replica: ReplicaRecord, code: CodeRecord
    ) -> Iterator[str]:
        address = replica.address("local")
        if not self.cluster.entry_is_ready(address):
            yield f"{replica} is not ready"
            return
        actor = cast(ScriptedReplica, self.cluster.actor(address))
        if actor.tag in self.script.sick:
            yield f"{actor.tag} is sick"
        if actor.is_reconfiguring:
            # The replica is replaced if that takes too long, even if its rank has meanwhile changed back.
            yield f"{actor.tag} is being reconfigured"
        if replica.config_id != backend.config_id:
            yield f"{replica} does not have the config of {backend}"
        if (actor.user_config, actor.concurrency) != (backend.user_config, backend.config.concurrency()):
            yield f"{actor.tag} runs with {actor.user_config!r}, wanted is {backend.user_config!r}"
        if actor.rank_info != (*replica.rank, backend.num_replicas):
            yield f"{actor.tag} has the rank {actor.rank_info}, wanted is {replica.rank} of {backend}"
        if actor.message.code != code.code:
            yield f"{actor.tag} runs {actor.message.code!r}, wanted is {code.code!r}"

    def _wrong_actors(self) -> Iterator[str]:
        controller = self._controller()
        expected = {*([] if controller is None else [controller])}
        expected |= {each.address("local") for each in self.witness.of(ReplicaRecord) if each.worker}
        proxies = self.witness.of(ProxyRecord)
        expected |= {each.address("local") for each in proxies if each.worker is not None}
        actors = self.cluster.actors()
        if set(actors) != expected or len(actors) != len(expected):
            yield f"left over: {set(actors) - expected}, missing: {expected - set(actors)}"
        workers = [each for each in self._workers() if not each.is_retiring]
        slots = {
            Location.NO_SERVER: set(),
            Location.HEAD_ONLY: {"head"},
            Location.EVERY_NODE: {each.host for each in workers},
            Location.EVERY_WORKER: {each.address for each in workers},
        }[self.location]
        if {each.name for each in proxies} != slots:
            yield f"there are the proxies {proxies}, wanted are {slots}"
        for proxy in proxies:
            if proxy.worker is None or proxy.is_leaving:
                yield f"{proxy} has not settled"
            if proxy.home in {each.host for each in workers}:
                yield f"{proxy} is not back at home"
        held = {each.worker for each in self.witness.of(ReplicaRecord)}
        held |= {worker for each in self.witness.of(ReplicaRecord) for worker in each.bundle_workers}
        with_proxies = frozenset(each.worker for each in proxies if each.worker is not None)
        in_use = held | with_proxies
        if self.location is Location.HEAD_ONLY:
            held = in_use
        found = self.cluster.reported
        if replace(found, occupied={}) != UsageReport(
            frozenset(in_use), proxies=with_proxies, held=frozenset(held)
        ) or not found.occupied.keys() <= set(held):
            yield f"the reported use is {self.cluster.reported}, but in use are {in_use}, held {held}"

    def _wrong_updates(self) -> Iterator[str]:
        expected = self._expected_updates()
        for key, value in self.received.items():
            if key.startswith("backend/") and value is not None:
                value = {**value, "replicas": tuple(sorted(value["replicas"]))}
            if value != expected.get(key):
                yield f"the listener has {key} = {value}, it should be {expected.get(key)}"
        for address in self.cluster.actors():
            if "/proxy/" in address.name and self.cluster.entry_is_ready(address):
                proxy = cast(ScriptedProxy, self.cluster.actor(address))
                if proxy.routes != expected["routes"]:
                    yield f"proxy {address} has {proxy.routes}, it should have {expected['routes']}"

    def _expected_updates(self) -> dict[str, Any]:
        endpoints = self.witness.of(EndpointRecord)
        updates: dict[str, Any] = {
            "routes": {each.route: self._expected_route(each) for each in endpoints if each.route is not None}
        }
        for each in endpoints:
            updates[f"endpoint/{each.name}"] = {
                "traffic": dict(each.traffic),
                "shadows": dict(each.shadows),
                "legacy": each.is_legacy,
                "python_methods": tuple(each.python_methods),
                "route": each.route,
            }
        for backend in self.witness.of(BackendRecord):
            updates[f"backend/{backend.tag}"] = {
                "replicas": tuple(
                    sorted(
                        (each.tag, each.worker, each.incarnation)
                        for each in self.witness.replicas(backend.tag)
                    )
                ),
                "concurrency": backend.config.concurrency(),
                "max_queued": backend.config.max_queued_requests,
                "max_crash_retries": backend.config.max_crash_retries,
                **({} if backend.is_deployment else {"kind": "backend"}),
            }
            if backend.autoscaling is not None:
                updates[f"backend/{backend.tag}"]["autoscaled"] = True
            if backend.capacity == 0:
                updates[f"backend/{backend.tag}"]["off"] = True
        return updates

    def _expected_route(self, endpoint: EndpointRecord) -> dict[str, Any]:
        expected: dict[str, Any] = {"endpoint": endpoint.name, "methods": tuple(endpoint.methods)}
        backends = {each.tag: each for each in self.witness.of(BackendRecord)}
        backend = None if endpoint.is_legacy else backends.get(endpoint.name)
        if backend is not None and backend.application:
            expected["application"] = backend.application
        return expected


def _routes(wanted: Wanted) -> dict[str, str]:
    return {each.route: name for name, each in wanted.endpoints.items() if each.route is not None}
