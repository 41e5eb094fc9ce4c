"""Executes actions: tasks that start, stop and reconfigure actors, and report the results.

There is one task per actor and kind of action, so a request for a running action does nothing. A task records
its result in `Observed` and wakes the loop. The pure parts decide what follows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeAlias, cast

from daskserve.cluster.protocols.base import STOP_MARGIN_S, ActorSpec, Cluster
from daskserve.cluster.protocols.usage import UsageReport
from daskserve.common.clock import Clock
from daskserve.common.copying import replace
from daskserve.common.formatting import shown
from daskserve.common.types import ActorAddress, ActorKind, RankInfo, as_rank_info, short_tag
from daskserve.control.backend.actions import ReconfigureReplica, StartReplica, StopReplica
from daskserve.control.backend.ranks import rank_info_of
from daskserve.control.observed.observed import Observed
from daskserve.control.proxies.step import StartProxy, StopProxy
from daskserve.control.records.bundles import places_of
from daskserve.control.records.model_decisions import at_start
from daskserve.control.records.proxy import ProxyRecord
from daskserve.control.records.records import ReplicaRecord
from daskserve.control.records.state import State
from daskserve.control.records.version_split import record_of
from daskserve.errors import (
    ActorLostError,
    CodeLoadError,
    InstanceError,
    RequestTimeoutError,
    ServeError,
    UnavailableError,
)
from daskserve.options.backend import BackendConfig
from daskserve.options.start_messages import OptionValues, ProxyStart, ReplicaStart, dump_config_in
from daskserve.payload.error_text import text_of

logger = logging.getLogger("daskserve.controller")

#: Delay before a call to an unreachable actor is retried.
ACTION_RETRY_S = 0.2

#: Timeout of a proxy's start, which takes milliseconds; after it, the start is retried.
PROXY_START_S = 30.0

Commit: TypeAlias = Callable[..., Awaitable[None]]


class ActionExecutor:
    """Executes the actions of one controller, each in a task.

    Parameters
    ----------
    commit, lock
        The same as those of the loop; needed to record a proxy's port once it is known.
    proxy_start
        Returns the start message of a proxy.
    enqueue
        Wakes the loop for some backends, or (None) for everything.
    announce
        Publishes backends to routers after a change that is not in their records.
    """

    def __init__(
        self,
        cluster: Cluster,
        clock: Clock,
        state: State,
        observed: Observed,
        *,
        commit: Commit,
        lock: AbstractAsyncContextManager[Any],
        proxy_start: Callable[[ProxyRecord], ProxyStart],
        enqueue: Callable[[Iterable[str] | None], None],
        announce: Callable[[Iterable[str]], object],
        debug: bool,
        tracing: Mapping[str, Any],
        logging_config: Callable[[], Mapping[str, Any] | None] = lambda: None,
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._state = state
        self._observed = observed
        self._commit = commit
        self._lock = lock
        self._proxy_start = proxy_start
        self._enqueue = enqueue
        self.announce = announce
        self._debug = debug
        self._logging = logging_config
        self._tracing = tracing
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._reported: UsageReport | None = None

    def report_usage(self, epoch: int, report: UsageReport) -> None:
        """Report the resources that the instance uses, if they have changed; retry on failure."""
        if report != self._reported:
            self._spawn("report", "", self._tell_scheduler(epoch, report), "")

    async def _tell_scheduler(self, epoch: int, report: UsageReport) -> None:
        try:
            self._observed.is_adaptive = await self._cluster.report(epoch, report)
        except (ServeError, OSError) as error:
            logger.warning("The report to the scheduler failed and is retried: %s", error)
            await self._clock.sleep(ACTION_RETRY_S)
        else:
            self._reported = report

    def act(self, action: StartReplica | StopReplica | ReconfigureReplica) -> None:
        """Begin an action on a replica."""
        replica = action.replica
        if isinstance(action, StartReplica):
            self._begin_start(replica)
        elif isinstance(action, StopReplica):
            starting = self._tasks.get(("start", replica.tag))
            if starting is not None:
                starting.cancel()
            # Two kinds, so that a forced stop does not wait for the grace period of an earlier stop.
            kind = "stop" if action.grace_s > 0 else "kill"
            self._spawn(kind, replica.tag, self._stop_replica(replica, action.grace_s), replica.backend)
        else:
            self._spawn("reconfigure", replica.tag, self._reconfigure(replica), replica.backend)

    def act_on_proxy(self, action: StartProxy | StopProxy) -> None:
        """Begin an action on a proxy."""
        proxy = action.proxy
        if isinstance(action, StartProxy):
            # The key is the incarnation, because an older one may not have answered yet.
            self._spawn("start proxy", str(proxy.incarnation), self._start_proxy(proxy), None)
        else:
            starting = self._tasks.get(("start proxy", str(proxy.incarnation)))
            if starting is not None:
                starting.cancel()
            self._spawn("stop proxy", proxy.tag, self._stop_proxy(proxy, action.grace_s), None)

    def _spawn(self, kind: str, name: str, coroutine: Any, backend: str | None) -> None:
        key = (kind, name)
        if key in self._tasks:
            coroutine.close()
            return

        def done(task: asyncio.Task[None]) -> None:
            if self._tasks.get(key) is task:
                del self._tasks[key]
            if not task.cancelled() and task.exception() is not None:
                logger.error("Acting on %s failed", name, exc_info=task.exception())
            if backend and name not in self._state.replicas:
                self._observed.forget_replica(name)  # its worker was lost while the action ran
            self._enqueue(None if backend is None else [backend])

        task = asyncio.create_task(coroutine, name=f"daskserve-{kind}-{name}")
        self._tasks[key] = task
        task.add_done_callback(done)

    def _begin_start(self, replica: ReplicaRecord) -> None:
        # The replica may have started while the decision was written, and must not start twice.
        if ("start", replica.tag) in self._tasks or replica.tag in self._observed.ready:
            return
        try:
            # Before the task begins, because the config may then be newer than the replica's record.
            spec = self._replica_spec(replica)
        except (CodeLoadError, InstanceError) as error:
            self._observed.failed[replica.tag] = error
            self._enqueue([replica.backend])
            return
        self._spawn("start", replica.tag, self._start_replica(replica, spec), replica.backend)

    async def _start_replica(self, replica: ReplicaRecord, spec: ActorSpec) -> None:
        address = replica.address(self._cluster.instance)
        try:
            facts = await self._cluster.create(spec, address.worker)
        except RequestTimeoutError as error:
            self._observed.failed[replica.tag] = RequestTimeoutError(
                f"Replica {short_tag(replica.tag)}{str(error).removeprefix(spec.name)} If it needs longer, "
                "raise start_timeout_s of its deployment."
            )
        except UnavailableError as error:
            # The replica may exist: retry until the worker answers or is lost.
            name = short_tag(replica.tag)
            logger.warning("Replica %s cannot be reached; the call is retried: %s", name, error)
            await self._clock.sleep(ACTION_RETRY_S)
        except Exception as error:
            # User code may raise anything; the pure part decides how to react.
            self._observed.failed[replica.tag] = error
        else:
            # The replica runs with the config in its record, because it may have existed before this call.
            self._observed.ready[replica.tag] = dict(facts)
            if facts.get("rank_info"):
                self._observed.rank_infos[replica.tag] = as_rank_info(facts["rank_info"])

    def _replica_spec(self, replica: ReplicaRecord) -> ActorSpec:
        backend = record_of(self._state, replica)
        code = self._state.codes.get(f"{replica.backend}@{replica.version}")
        if code is None:
            raise CodeLoadError(
                f"The store has no code for version {replica.named_version} of {backend.display_name}: "
                "it is lost or damaged. Deploy it again."
            )
        return ActorSpec(
            kind=ActorKind.REPLICA,
            name=replica.address(self._cluster.instance).name,
            incarnation=replica.incarnation,
            instance=self._cluster.instance,
            start_timeout_s=backend.config.start_timeout_s,
            payload=ReplicaStart(
                backend_tag=replica.backend,
                replica_tag=replica.tag,
                code=code.code,
                config=cast(BackendConfig, OptionValues(dump_config_in(backend.config, self._logging()))),
                concurrency=backend.config.concurrency(),
                user_config=backend.user_config,
                environment=backend.env,
                debug=self._debug,
                is_async=not backend.config.internal_metadata.is_blocking,
                code_name=code.name,
                rank_info=self._rank_info_of(replica),
                actors=backend.actors,
                actor_of=backend.actor_of,
                gang=replica.gang,
                bundles=places_of(replica) if replica.bundles else (),
                is_deployment=backend.is_deployment,
                models=at_start(self._state.models.get(replica.backend)),
                is_exact=backend.is_exact,
                tracing=self._tracing,
            ).encode(),
        )

    def _rank_info_of(self, replica: ReplicaRecord) -> RankInfo:
        rank_info = rank_info_of(record_of(self._state, replica), replica)
        if rank_info is None:
            raise InstanceError(f"Replica {replica.tag} has been placed without a rank.")
        return rank_info

    async def _stop_replica(self, replica: ReplicaRecord, grace_s: float) -> None:
        address = replica.address(self._cluster.instance)
        if await self._destroy(f"Replica {short_tag(replica.tag)}", address, grace_s):
            self._observed.gone.add(replica.tag)

    async def _destroy(self, name: str, address: ActorAddress, grace_s: float) -> bool:
        """Stop an actor; return False, after a pause, if that failed and should be retried."""
        try:
            await self._clock.wait_for(self._cluster.destroy(address, grace_s), grace_s + STOP_MARGIN_S)
        except TimeoutError:
            logger.warning("%s did not stop within its grace period and is abandoned", name)
        except (ServeError, OSError) as error:
            logger.warning("%s could not be stopped; this is retried: %s", name, error)
            await self._clock.sleep(ACTION_RETRY_S)
            return False
        return True

    async def _reconfigure(self, replica: ReplicaRecord) -> None:
        backend = record_of(self._state, replica)
        rank_info = self._rank_info_of(replica)
        patience_s = backend.config.experimental_graceful_shutdown_timeout_s
        try:
            call = self._cluster.call(
                replica.address(self._cluster.instance),
                "reconfigure",
                user_config=backend.user_config,
                concurrency=backend.config.concurrency(),
                config=dump_config_in(backend.config, self._logging()),
                rank_info=rank_info,
                patience_s=patience_s,
            )
            await self._clock.wait_for(call, patience_s + backend.config.start_timeout_s)
        except (ActorLostError, UnavailableError) as error:
            logger.warning("Replica %s could not be reconfigured: %s", short_tag(replica.tag), error)
            await self._clock.sleep(ACTION_RETRY_S)  # the watch may detect its loss in the meantime
        except Exception as error:
            # The user's reconfigure raised; the pure part decides how to react. An error about a superseded
            # config is ignored, and so is the timeout of a stopped process.
            is_there = replica.backend in self._state.backends
            means_it = is_there and record_of(self._state, replica).config_id == backend.config_id
            if isinstance(error, TimeoutError):
                means_it = means_it and replica.worker not in self._observed.unresponsive
                error = RequestTimeoutError(
                    f"Replica {short_tag(replica.tag)}: reconfigure() did not return within "
                    f"{shown(backend.config.start_timeout_s)} s, and {shown(patience_s)} s for the requests "
                    "before it. If it needs longer, raise "
                    "start_timeout_s of its deployment."
                )
            if means_it:
                self._observed.reconfigure_failed[replica.tag] = error
        else:
            self._observed.configured[replica.tag] = backend.config_id
            self._observed.rank_infos[replica.tag] = rank_info

    async def _start_proxy(self, proxy: ProxyRecord) -> None:
        address = proxy.address(self._cluster.instance)
        spec = ActorSpec(
            kind=ActorKind.PROXY,
            name=address.name,
            incarnation=proxy.incarnation,
            instance=self._cluster.instance,
            payload=self._proxy_start(proxy).encode(),
        )
        try:
            facts = await self._clock.wait_for(self._cluster.create(spec, address.worker), PROXY_START_S)
        except Exception as error:
            # Causes include a port in use, a lost worker and a middleware that raises. Callers that wait for
            # HTTP get the error.
            if self._is_current(proxy):
                self._observed.proxies_failed[proxy.name] = error
            logger.warning("Proxy %s did not start on %s: %s", proxy.name, proxy.worker, text_of(error))
            await self._clock.sleep(ACTION_RETRY_S)
            return
        if proxy.may_move or proxy.port != facts["port"]:
            async with self._lock:
                if self._state.proxies.get(proxy.name) == proxy:
                    await self._commit({proxy.key: replace(proxy, port=facts["port"], may_move=False)})
        if self._is_current(proxy):
            self._observed.proxies_failed.pop(proxy.name, None)
            self._observed.proxies_ready[proxy.name] = {**facts, "incarnation": proxy.incarnation}

    def _is_current(self, proxy: ProxyRecord) -> bool:
        """Return whether a proxy is neither leaving nor lost."""
        current = self._state.proxies.get(proxy.name)
        place = (proxy.worker, proxy.incarnation)
        return current is not None and (current.worker, current.incarnation) == place

    async def close_proxies(self, proxies: Iterable[ProxyRecord], grace_s: float) -> None:
        """Stop proxies permanently, each once its requests have ended, or after the grace period."""
        closing = (self._stop_proxy(proxy, grace_s) for proxy in proxies if proxy.worker is not None)
        for outcome in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(outcome, Exception):
                logger.warning("A proxy did not stop: %r", outcome)

    async def _stop_proxy(self, proxy: ProxyRecord, grace_s: float) -> None:
        address = proxy.address(self._cluster.instance)
        facts = self._observed.proxies_ready.get(proxy.name)
        if facts is not None and facts["incarnation"] == proxy.incarnation:
            del self._observed.proxies_ready[proxy.name]
        is_gone = await self._destroy(f"Proxy {proxy.tag}", address, grace_s)
        if is_gone and proxy.is_leaving and proxy.tag in self._state.proxies:
            self._observed.proxies_gone.add(proxy.tag)

    async def stop(self) -> None:
        """Cancel all running actions."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=2)
