"""The supervisor of a scheduler without workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from distributed import Scheduler
from tables import each_case

from daskserve._version import PROTOCOL, __version__
from daskserve.cluster.scheduler.supervisor import Supervisor
from daskserve.errors import NotRunningError, UnavailableError
from daskserve.payload.packed_errors import load_error
from daskserve.telemetry.collector import PROCESS

OPTIONS: Any = {"port": 0, "dashboard": False, "dashboard_address": "127.0.0.1:0", "host": "127.0.0.1"}


@asynccontextmanager
async def started() -> AsyncIterator[Supervisor]:
    async with Scheduler(**OPTIONS) as scheduler:
        found = Supervisor()
        await found.start(scheduler)
        try:
            yield found
        finally:
            await found.close()


async def error_of(supervisor: Supervisor, verb: str, **message: Any) -> BaseException:
    answer = await supervisor.handle(verb, message, __version__, PROTOCOL)
    error: BaseException = load_error(answer["error"])
    return error


@each_case(
    "verb, message",
    {
        "controller": {},
        "report": {"epoch": 1},
        "restart_worker": {"epoch": 1, "worker": "tcp://127.0.0.1:1"},
        "share_instance": {},
        "drain_instance": {},
        "commit_records": {"epoch": 1, "records": {}, "parcels": {}},
    }.items(),
)
async def test_a_verb_for_an_instance_that_has_ended_says_so(verb: str, message: dict[str, Any]) -> None:
    async with started() as supervisor:
        error = await error_of(supervisor, verb, instance="gone", **message)
    assert isinstance(error, NotRunningError)
    assert "'gone' does not run on this cluster" in str(error)


async def test_the_workers_of_an_instance_without_a_controller_are_not_known_yet() -> None:
    async with started() as supervisor:
        error = await error_of(supervisor, "workers", instance="gone")
    assert isinstance(error, UnavailableError)


async def test_a_supervisor_that_has_ended_starts_no_instance() -> None:
    async with started() as supervisor:
        pass
    error = await error_of(supervisor, "start_instance", instance="late", store="memory://")
    assert isinstance(error, NotRunningError)
    assert "register it again" in str(error)


async def test_a_supervisor_leaves_nothing_in_its_scheduler() -> None:
    def in_scheduler() -> dict[str, set[Any]]:
        return {
            "handlers": {*scheduler.handlers, *scheduler.stream_handlers},
            "plugins": set(scheduler.plugins),
            "callbacks": set(scheduler.periodic_callbacks),
            # The secret belongs to the cluster, and the next supervisor uses it, too.
            "attributes": set(vars(scheduler)) - {"_daskserve_channel_secret"},
            "metrics": {name for name, _, _ in PROCESS.samples()},
        }

    async with Scheduler(**OPTIONS) as scheduler:
        before = in_scheduler()
        found = Supervisor()
        await found.start(scheduler)
        assert in_scheduler() != before
        await found.close()
        assert in_scheduler() == before
