"""Builds declared applications: the loop that turns configurations into deployments.

An application is built until its record has a result for its generation. If the controller is lost, either
the old or the new version of the application remains, and the next controller builds again.

User code is imported in workers only, several applications at a time. If the worker is lost or an import
hangs, the applications of the batch are built one by one, so that only the faulty one fails.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from daskserve.cluster.protocols.base import EPOCH_BITS, ActorSpec, Cluster
from daskserve.common.clock import Clock
from daskserve.common.formatting import counted, shown
from daskserve.common.types import ActorAddress, ActorKind, WorkerAddress
from daskserve.control.declared.settling import Built, settled, waits_for_route
from daskserve.control.observed.observed import Observed
from daskserve.control.records.declared import ConfigRecord
from daskserve.control.records.state import State
from daskserve.control.records.storing.writer import Writer
from daskserve.errors import (
    ActorLostError,
    RequestTimeoutError,
    ServeError,
    StaleEpochError,
    UnavailableError,
)
from daskserve.loops.tasks import TaskSet
from daskserve.options.specs import ApplicationSpec
from daskserve.options.start_messages import BuilderStart

logger = logging.getLogger("daskserve.controller")

#: Time in seconds within which one application must be built, which includes the import of its modules.
BUILD_S = 300.0
#: Number of applications that one worker builds at a time, in one thread.
BATCH = 50
#: Maximum number of concurrent builds.
MAX_BUILDS = 4
#: How often a build is retried after the loss of its worker.
MAX_LOSSES = 3
#: Pause before a build is retried; it doubles with each loss of its worker.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
#: Maximum interval of the loop.
LOOK_S = 5.0


class Builders:
    """Builds applications in workers."""

    def __init__(
        self,
        cluster: Cluster,
        observed: Observed,
        *,
        epoch: int,
        next_worker: Callable[[], WorkerAddress | None],
    ) -> None:
        self._cluster = cluster
        self._observed = observed
        self._next_worker = next_worker
        self._incarnations = itertools.count((epoch << EPOCH_BITS) + 1)
        self._room = asyncio.Semaphore(MAX_BUILDS)
        #: The workers in which an import hangs, because imports cannot be interrupted; builds avoid these
        #: workers.
        self._hanging: set[WorkerAddress] = set()

    async def build(self, configs: Sequence[Mapping[str, Any]]) -> dict[str, Built]:
        """Return the spec of each application, or the reason why it cannot be built.

        Raises
        ------
        UnavailableError
            There is no worker, or several were lost.
        """
        batches = [configs[start : start + BATCH] for start in range(0, len(configs), BATCH)]
        found: dict[str, Built] = {}
        for each in await asyncio.gather(*map(self._build, batches)):
            found |= each
        return found

    async def _build(self, configs: Sequence[Mapping[str, Any]]) -> dict[str, Built]:
        try:
            return await self.build_batch(configs)
        except (RequestTimeoutError, UnavailableError) as error:
            if len(configs) > 1 and not isinstance(error, NoWorkerError):
                return dict([pair for each in configs for pair in (await self._build([each])).items()])
            if isinstance(error, RequestTimeoutError | ActorLostError):
                return {configs[0]["name"]: str(error)}
            raise

    async def build_batch(self, configs: Sequence[Mapping[str, Any]]) -> dict[str, Built]:
        """Build a few applications in one worker.

        Raises
        ------
        RequestTimeoutError
            One of them took too long.
        ActorLostError, UnavailableError
            The worker was lost, or there is none.
        """
        async with self._room:
            worker = self._worker()
            incarnation = next(self._incarnations)
            name = f"{self._cluster.instance}/{ActorKind.BUILDER}/{incarnation}"
            spec = ActorSpec(
                kind=ActorKind.BUILDER,
                name=name,
                incarnation=incarnation,
                instance=self._cluster.instance,
                start_timeout_s=BUILD_S,
                payload=BuilderStart(list(configs)).encode(),
            )
            try:
                facts = await self._cluster.create(spec, worker)
            except UnavailableError:
                self._hanging.add(worker)
                raise
            except RequestTimeoutError as error:
                self._hanging.add(worker)
                what = str(error).rpartition(": it was still ")[2]
                raise RequestTimeoutError(
                    f"{what[:1].upper()}{what[1:].removesuffix('.')} did not end within {shown(BUILD_S)} s. "
                    "A module must not block or start to serve while it is imported; check whether one "
                    "does."
                ) from None
            finally:
                await self._remove(ActorAddress(name, worker, incarnation))
        return {config["name"]: _result(each) for config, each in zip(configs, facts["built"], strict=True)}

    def _worker(self) -> WorkerAddress:
        """Return the worker for a build: the next replica's worker, or any other if an import hangs there."""
        known = sorted(each.address for each in self._observed.cleared_workers() if each.is_available)
        if not known:
            raise NoWorkerError("No worker can build the application.")
        self._hanging.intersection_update(known)
        found = self._next_worker()
        if found is not None and found not in self._hanging:
            return found
        return next((each for each in known if each not in self._hanging), found or known[0])

    async def _remove(self, address: ActorAddress) -> None:
        try:
            await self._cluster.destroy(address, 0)
        except (ServeError, OSError) as error:
            logger.info("%s could not be removed, and is an orphan: %s", address.name, error)


class NoWorkerError(UnavailableError):
    """There is no worker that could build an application."""


def _result(built: Mapping[str, Any]) -> Built:
    if "error" in built:
        return f"{built['error']}\n{built['user_traceback']}".strip()
    return ApplicationSpec.from_plain(built["spec"])


class Building:
    """The loop that builds and deploys declared applications; see the module.

    Parameters
    ----------
    rng
        Draws the ids of goals.
    writer
        The lock and the path of changes.
    next_worker
        Returns the worker of the next replica, or None.
    enqueue
        Wakes the reconcile loop for some backends.
    """

    def __init__(
        self,
        cluster: Cluster,
        clock: Clock,
        rng: random.Random,
        state: State,
        observed: Observed,
        writer: Writer,
        *,
        epoch: int,
        next_worker: Callable[[], WorkerAddress | None],
        enqueue: Callable[[Collection[str]], None],
    ) -> None:
        self.builders = Builders(cluster, observed, epoch=epoch, next_worker=next_worker)
        self._state = state
        self._observed = observed
        self._clock = clock
        self._rng = rng
        self._writer = writer
        self._enqueue = enqueue
        self._wake = asyncio.Event()
        self._tasks = TaskSet(logger)
        #: The applications that are being built, or are built and wait for a route.
        self._busy: set[str] = set()
        #: How often each application's worker was lost, and when the application may be built again.
        self._losses: dict[str, int] = {}
        #: How often in a row the result of each application could not be written.
        self._unwritten: dict[str, int] = {}
        self._not_before: dict[str, float] = {}
        #: The reasons why applications wait, which the status shows.
        self.waiting: dict[str, str] = {}
        #: Built applications that wait until another declared application gives up their route.
        self._ready: dict[str, tuple[ConfigRecord, ApplicationSpec]] = {}

    def wake(self) -> None:
        """Run the loop now."""
        self._wake.set()

    async def stop(self) -> None:
        """Cancel the running builds."""
        await self._tasks.close(timeout_s=2)

    async def run(self) -> None:
        """Run until cancelled, or replaced by a newer controller."""
        while True:
            self._wake.clear()
            try:
                await self._deploy_ready()
                self._begin()
            except StaleEpochError:
                return
            except (ServeError, OSError) as error:
                logger.warning("The declared configuration is not deployed yet: %s", error)
            except Exception:
                # The loop must survive, because without it no configuration is deployed.
                logger.exception("A step of the declared configuration failed and is retried")
            now = self._clock.now()
            pauses = [at - now for name, at in self._not_before.items() if name not in self._busy]
            try:
                await self._clock.wait_for(self._wake.wait(), max(0.05, min([LOOK_S, *pauses])))
            except TimeoutError:
                pass

    def _begin(self) -> None:
        """Start the builds of applications without a result."""
        now, configs = self._clock.now(), self._state.declared.configs
        unsettled = {each.name for each in configs.values() if not each.is_settled}
        for known in (self._losses, self._unwritten, self._not_before, self.waiting):
            for name in known.keys() - unsettled:
                known.pop(name)
        due = [
            each
            for each in configs.values()
            if not each.is_settled
            and each.name not in self._busy
            and self._not_before.get(each.name, 0) <= now
        ]
        # After a loss, build one at a time, so that a crash does not end the worker of other builds.
        is_busy = not self._busy.isdisjoint(self._losses.keys() - self._ready.keys())
        alone = [[each] for each in due if each.name in self._losses][: 0 if is_busy else 1]
        together = [each for each in due if each.name not in self._losses]
        batches = [together[start : start + BATCH] for start in range(0, len(together), BATCH)]
        for batch in (*alone, *batches):
            self._busy.update(each.name for each in batch)
            self._tasks.spawn(self._build(batch), "build")

    async def _build(self, records: Sequence[ConfigRecord]) -> None:
        try:
            try:
                built = await self.builders.build_batch([each.config for each in records])
            except (UnavailableError, RequestTimeoutError) as error:
                built = self._failed(records, error)
            if built:
                await self._settle(
                    {each.name: (each, built[each.name]) for each in records if each.name in built}
                )
        except StaleEpochError:
            pass  # the loop ends as well
        except (ServeError, OSError) as error:
            logger.warning("The result of a build could not be written, and it is built again: %s", error)
            for each in records:
                self._unwritten[each.name] = self._unwritten.get(each.name, 0) + 1
                self.waiting[each.name] = f"It is built, but the result could not be written: {error}"
            self._pause(records)
        except Exception:
            logger.exception("A build failed in the controller and is retried")
            self._pause(records)
        finally:
            self._busy.difference_update(each.name for each in records if each.name not in self._ready)
            self._wake.set()

    def _failed(self, records: Sequence[ConfigRecord], error: ServeError) -> dict[str, Built]:
        """Return the results of a batch that failed as a whole; applications without a result are built
        again."""
        is_alone = len(records) == 1
        if isinstance(error, RequestTimeoutError) and is_alone:
            return {records[0].name: str(error)}
        if not isinstance(error, NoWorkerError):
            for each in records:
                self._losses[each.name] = self._losses.get(each.name, 0) + is_alone
        lost = self._losses.get(records[0].name, 0)
        if is_alone and isinstance(error, ActorLostError) and lost > MAX_LOSSES:
            times = counted(lost, "time")
            return {records[0].name: f"The worker that imported the application ended, {times}: {error}"}
        for each in records:
            self.waiting[each.name] = str(error)
        self._pause(records if is_alone or isinstance(error, NoWorkerError) else ())
        return {}

    def _pause(self, records: Sequence[ConfigRecord]) -> None:
        for each in records:
            failures = max(self._losses.get(each.name, 0), self._unwritten.get(each.name, 0))
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(10, failures))
            self._not_before[each.name] = self._clock.now() + pause_s

    async def _settle(self, built: Mapping[str, tuple[ConfigRecord, Built]]) -> None:
        """Deploy the built applications, and record why others failed."""
        waiting = {name: spec for name, (_, spec) in self._ready.items()}
        waiting |= {name: spec for name, (_, spec) in built.items() if not isinstance(spec, str)}
        try:
            async with self._writer:
                if self._writer.is_detached:
                    return
                outcome = settled(
                    self._state,
                    built,
                    waiting,
                    new_goal=lambda: f"{self._rng.getrandbits(128):032x}",
                    now=self._clock.wall(),
                    unloadable=self._observed.unloadable.keys(),
                )
                await self._writer.commit(outcome.change)
        except (UnavailableError, OSError):
            raise
        except ServeError:
            if len(built) == 1:
                raise
            for name, each in built.items():
                await self._settle({name: each})
            return
        for name, (record, spec) in built.items():
            if name in outcome.waits and not isinstance(spec, str):
                self._ready[name] = (record, spec)
                self.waiting[name] = outcome.waits[name]
            else:
                self._ready.pop(name, None)
                self._busy.discard(name)
        self._enqueue(outcome.tags)

    async def _deploy_ready(self) -> None:
        """Deploy the applications that no longer have to wait for their route."""
        for name, (record, _) in list(self._ready.items()):
            if self._state.declared.configs.get(name) != record:
                del self._ready[name]  # a newer configuration was declared and is built next
                self._busy.discard(name)
        specs = {name: spec for name, (_, spec) in self._ready.items()}
        ready = [
            name for name, spec in specs.items() if waits_for_route(self._state, spec, specs, specs) is None
        ]
        if ready:
            await self._settle({name: self._ready[name] for name in ready})
