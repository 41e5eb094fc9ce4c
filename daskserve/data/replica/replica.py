"""A replica: an actor that runs one copy of a backend's user code.

It lives on the worker's loop and keeps the books: how many requests run, which may still come in, what is
to happen when one is cancelled or the replica has to go. User code itself, from unpickling it to its
destructor, runs behind the `daskserve.data.replica.wall.Wall`.

A request holds a slot from before its user code begins until that has really ended, be its caller long
gone. So a replica never runs more than ``concurrency`` requests, and code that cannot be stopped is seen.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from daskserve.clock import stopwatch
from daskserve.cluster.base import ActorContext, verb, verbs_of
from daskserve.context import ReplicaContext, current_replica
from daskserve.data.replica.answering import Answering
from daskserve.data.replica.autoscaling_stats import StatsRecorder
from daskserve.data.replica.batches import ReplicaBatches
from daskserve.data.replica.construction import construct, destruct
from daskserve.data.replica.conversion import user_traceback
from daskserve.data.replica.definitions import is_async
from daskserve.data.replica.health import HealthWatch, probe_liveness
from daskserve.data.replica.servable import Servable, load_definition, run_hook, run_hook_in_thread
from daskserve.data.replica.slots import Slot, SlotHolder
from daskserve.data.replica.straight_answer import StraightAnswer
from daskserve.data.replica.straight_http import StraightHTTP
from daskserve.data.replica.wall import Wall
from daskserve.errors import (
    ActorLostError,
    ReplicaBusyError,
    ReplicaStartError,
    UserCodeError,
)
from daskserve.figures.replica import ReplicaFigures
from daskserve.figures.table import MetricSample
from daskserve.loops.deadlines import is_over
from daskserve.starts import ReplicaStart
from daskserve.types import Envelope, EnvelopeKind, Load, OnAnswer, Receive, Send

logger = logging.getLogger("daskserve.replica")

#: What user code gets to react to being cancelled, and again for its destructor and its threads' ends.
CLOSE_GRACE_S = 1.0


class Replica(SlotHolder):
    """The `daskserve.cluster.base.Hosted` that runs user code."""

    def __init__(self, context: ActorContext) -> None:
        self._context = context
        self.verbs = verbs_of(self)
        self._start = start = ReplicaStart.decode(context.spec.payload)
        super().__init__(start.concurrency)
        self._wall: Wall | None = None
        self._servable: Servable | None = None
        self._answering: Answering | None = None
        self._figures = figures = ReplicaFigures()
        self._labels = (context.spec.instance, self._start.backend_tag, self._start.replica_tag)
        #: Return what user code measures (`daskserve.metrics`), and what autoscaling asks for every second.
        self.user_samples = partial(self._figures.user_samples, self._labels)
        stats = StatsRecorder(start.replica_tag, self._running, context.clock)
        self.figures = partial(self._figures.brief, self.load, stats.figures)
        self._batches = ReplicaBatches(self._parts, start.max_batch_size, start.batch_wait_timeout_s, figures)
        self._reconfiguring = asyncio.Lock()
        self._ending: asyncio.Task[None] | None = None
        self._health = HealthWatch(
            self._start.replica_tag,
            self.probe,
            context.clock,
            period_s=self._start.health_period_s,
            timeout_s=self._start.health_timeout_s,
            threshold=self._start.health_threshold,
        )

    def __repr__(self) -> str:
        state = "open" if self._is_open else "closed"
        return f"<Replica {self._start.replica_tag} {state} {self._ongoing}/{self._concurrency}>"

    # ---- start

    async def start(self) -> Mapping[str, Any]:
        """Load and construct the user's code and return facts about it.

        Raises
        ------
        ReplicaStartError
            The user's code failed; it carries the traceback.
        """
        start = self._start
        began = stopwatch()
        context = contextvars.copy_context()
        self._wall = Wall(
            start.replica_tag,
            context,
            threads=_threads(start.concurrency),
            event_loop=start.event_loop,
            landing=self._context.landing,
        )
        self._wall.is_watched = False
        self._set_current_replica(None)
        step = "could not be loaded"
        failure: ReplicaStartError | None = None
        try:
            load = partial(load_definition, backend_tag=start.backend_tag, is_debug=start.debug)
            servable = self._servable = await self._wall.run_sync(load, start.code)
            servable.check_batching(start.max_batch_size)
            step = "failed in its constructor"
            await construct(self._wall, servable)
            self._set_current_replica(servable.target)
            if start.user_config is not None:
                step = "failed in reconfigure()"
                await self._run_hook(self._wall, servable, "reconfigure", start.user_config)
        except asyncio.CancelledError:
            await self._end()
            raise
        except Exception as error:
            failure = self._user_error(step, error)
        if failure is not None:
            # Out here the user's error is gone, and with its traceback the last hold on the user's object.
            self._figures.start_failures += 1
            await self._end()
            raise failure
        self._answering = Answering(self._wall, servable, self._batches, self._figures)
        self._answering.has_method_header = start.method_header
        self._is_open = self._wall.is_watched = True
        try:
            await self._health.check()
        except Exception as error:
            self._is_open = False
            self._figures.start_failures += 1
            await self._end()
            raise self._user_error("failed its first health check", error) from error
        self._health.start()
        self._figures.record_start(stopwatch() - began, self._context.clock.wall())
        facts = servable.facts
        return {
            "is_blocking": facts.is_blocking,
            "is_asgi_app": facts.is_asgi_app,
            "accepts_batches": facts.accepts_batches,
            "methods": sorted(facts.methods),
        }

    def _set_current_replica(self, servable_object: Any) -> None:
        assert self._wall is not None
        spec = self._context.spec
        replica = ReplicaContext(
            spec.instance,
            self._start.backend_tag,
            self._start.replica_tag,
            servable_object,
            self._context.cluster,
            self._concurrency,
            self._figures,
        )
        self._wall.context.run(current_replica.set, replica)

    def _user_error(self, step: str, error: Exception) -> ReplicaStartError:
        return ReplicaStartError(
            f"Backend {self._start.backend_tag!r} {step}: {type(error).__name__}: {error}",
            user_traceback=user_traceback(error),
        )

    # ---- requests

    async def handle(self, envelope: Envelope, receive: Receive, send: Send) -> Load:
        """Answer one request with user code.

        Raises
        ------
        ReplicaBusyError
            All slots are taken, for longer than the request has patience; it has not begun.
        ActorLostError
            The replica is stopping: not begun, or begun and cancelled as the grace period ended.
        """
        answering = self._answering
        if not self._is_open or answering is None:
            raise self._not_running()
        figures = self._figures
        if self._ongoing >= self._concurrency or envelope.patience is not None:
            await self._take_slot(envelope, send)
        else:
            self._ongoing += 1
        figures.handled += 1
        began = stopwatch()
        slot = Slot(self.free_slot)
        try:
            await answering.answer(envelope, receive, send, slot)
        except asyncio.CancelledError:
            figures.give_up(is_late=is_over(envelope.deadline, self._context.clock.now()))
            raise
        except Exception:
            figures.failed += 1
            raise
        finally:
            figures.latency.observe(stopwatch() - began)
            slot.release()
        return self.load()

    def answer_straight(self, envelope: Envelope, on_answer: OnAnswer) -> Callable[[], None] | None:
        """Answer a request without a task, and return what gives it up; None if it is one for `handle`."""
        answering = self._answering
        if not self._is_open or answering is None or self._ongoing >= self._concurrency:
            return None
        method = answering.straight_method(envelope)
        if method is None:
            return None
        self._ongoing += 1
        self._figures.handled += 1
        kind = StraightHTTP if envelope.kind is EnvelopeKind.HTTP else StraightAnswer
        straight = kind(self, answering, method, envelope, on_answer)
        try:
            straight.start()
        except BaseException:
            self._figures.failed += 1
            self.free_slot()
            raise
        return straight.give_up

    def load(self) -> Load:
        """Return how many requests run, and how many wait: of these for their batch, or others for a slot."""
        queued = self._batches.queued if self._batches.queues else 0
        return Load(self._ongoing, queued + len(self._line.places))

    def _refusal(self) -> ReplicaBusyError:
        return self._figures.refusal(self._start.replica_tag, self._ongoing)

    # ---- verbs

    @verb
    async def reconfigure(
        self,
        user_config: bytes | None,
        concurrency: int,
        max_batch_size: int = 0,
        batch_wait_timeout_s: float = 0.0,
        method_header: bool = False,
    ) -> None:
        """Take over changed options without a restart; a ``user_config`` goes to the user's ``reconfigure``.

        Raises
        ------
        BadRequestError
            The callable has no ``reconfigure`` or takes no batches; nothing has been changed.
        ReplicaStartError
            The user's ``reconfigure`` failed; it carries the traceback.
        """
        wall, servable = self._running()
        async with self._reconfiguring:
            servable.check_batching(max_batch_size)
            failure: ReplicaStartError | None = None
            if user_config is not None:
                servable.hook("reconfigure")
                try:
                    await self._run_hook(wall, servable, "reconfigure", user_config)
                except Exception as error:
                    failure = self._user_error("failed in reconfigure()", error)
            if failure is not None:
                raise failure  # out here, as in start()
            self._set_concurrency(concurrency)
            wall.threads.limit = _threads(concurrency)
            self._set_current_replica(servable.target)
            self._batches.reconfigure(max_batch_size, batch_wait_timeout_s)
            if self._answering is not None:
                self._answering.has_method_header = method_header

    @verb
    async def statistics(self) -> dict[str, Any]:
        """Return the replica's figures; those that end in ``_total`` only grow."""
        wall, load = self._wall, self.load()
        return {
            "replica_tag": self._start.replica_tag,
            "ongoing": load.ongoing,
            "queued": load.queued,
            "concurrency": self._concurrency,
            "abandoned": wall.abandoned if wall else 0,
            "threads": len(wall.threads) if wall else 0,
            **self._figures.plain(),
            "blocked_loop_total": wall.blocked_count if wall else 0,
        }

    def samples(self) -> list[MetricSample]:
        """Return the replica's figures as metrics; see `daskserve.figures.collector.Source`."""
        wall = self._wall
        return self._figures.samples(self._labels) + self._figures.states(
            self._labels,
            load=self.load(),
            concurrency=self._concurrency,
            abandoned=wall.abandoned if wall else 0,
            loop_blocks=wall.blocked_count if wall else 0,
            probe_failures=self._health.failures_total,
            is_healthy=self._health.is_healthy,
        )

    @verb
    async def probe(self) -> None:
        """Return if user code can run where it runs, and the user's ``check_health`` does not object.

        It returns late, or never, if that place is blocked: call it with a deadline.

        Raises
        ------
        UnavailableError
            Every slot is held by a call that was given up and runs on.
        UserCodeError
            ``check_health`` raised.
        """
        wall, servable = self._running()
        if self._start.has_liveness:
            await probe_liveness(wall, servable, self._start.replica_tag, self._concurrency)
        if servable.is_class and hasattr(servable.target, "check_health"):
            try:
                await self._run_hook(wall, servable, "check_health", reserved=True)
            except Exception as error:
                raise UserCodeError(
                    f"check_health() of backend {self._start.backend_tag!r} raised "
                    f"{type(error).__name__}: {error}"
                ) from error

    def health(self) -> dict[str, Any]:
        """Return what the replica's own probes found, in plain values."""
        return self._health.facts()

    def _running(self) -> tuple[Wall, Servable]:
        if not self._is_open or self._wall is None or self._servable is None:
            raise self._not_running()
        return self._wall, self._servable

    def _not_running(self) -> ActorLostError:
        return ActorLostError(f"Replica {self._start.replica_tag!r} is not running.", begun=False)

    def _parts(self) -> tuple[Wall, Servable]:
        if self._wall is None or self._servable is None:
            raise ActorLostError(f"Replica {self._start.replica_tag!r} was stopped.", begun=False)
        return self._wall, self._servable

    async def _run_hook(
        self, wall: Wall, servable: Servable, name: str, *pickles: bytes, reserved: bool = False
    ) -> None:
        hook = servable.hook(name)
        if is_async(hook):
            await wall.run_async(run_hook, hook, *pickles)
        else:
            await wall.run_sync(run_hook_in_thread, hook, *pickles, reserved=reserved)

    # ---- stop

    async def send_away(self) -> None:
        """Close the WebSockets, which would never end by themselves, with code 1001."""
        if self._answering is not None:
            self._answering.send_away()

    async def stop(self, grace_s: float) -> None:
        """End: refuse requests, let the running ones finish for ``grace_s``, cancel the rest, destruct."""
        self._close()
        await self.send_away()
        await self._health.stop()
        try:
            await self._context.clock.wait_for(self._wait_until_idle(), grace_s)
        except TimeoutError:
            logger.info("%r cancels what still runs after %s s", self, grace_s)
        await self._end()

    async def _end(self) -> None:
        # One task whoever asks, so that a stop() that is cancelled leaves no thread behind.
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._tear_down())
        await asyncio.shield(self._ending)

    async def _tear_down(self) -> None:
        wall, servable = self._wall, self._servable
        if wall is not None:
            wall.abort_calls(ActorLostError(f"Replica {self._start.replica_tag!r} was stopped."))
            self._set_current_replica(None)
            wait_for = self._context.clock.wait_for
            try:
                await wait_for(self._wait_until_idle(), CLOSE_GRACE_S)  # what was cancelled may clean up
                if servable is not None:
                    await wait_for(destruct(wall, servable), CLOSE_GRACE_S)
            except TimeoutError:
                logger.warning("%r leaves its user code behind: it does not end", self)
            except Exception:
                logger.exception("The destructor of %r failed", self)
            await wall.close(CLOSE_GRACE_S)
        self._servable = None
        if self._idle is not None:
            self._idle.set()


def _threads(concurrency: int) -> int:
    # One more than there are slots, so that reconfigure() and the destructor need not wait for requests.
    return concurrency + 1
