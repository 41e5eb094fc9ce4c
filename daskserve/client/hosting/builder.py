"""The actor that builds applications for the controller, in a thread of a worker's process.

User code runs there, and never in the process of the controller or the scheduler. Starting the actor builds
the applications. It reports their specs, and the controller then removes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any

from daskserve.cluster.protocols.base import ActorContext, Verb
from daskserve.common.types import ActorRequest, Envelope
from daskserve.errors import BadRequestError, ReplicaStartError, ServeError, UnavailableError
from daskserve.loops.threads import start_daemon
from daskserve.options.start_messages import BuilderStart
from daskserve.payload.importing import ModuleScan
from daskserve.payload.parcels import Parcel
from daskserve.telemetry.table import MetricSample


class Builder:
    """Builds applications in a thread; see the module."""

    def __init__(self, context: ActorContext) -> None:
        self._context = context
        self._configs = BuilderStart.decode(context.spec.payload).configs
        self._stage = ("waiting for a thread", context.clock.now())
        self.verbs: Mapping[str, Verb] = {}

    def stage(self) -> tuple[str, float]:
        """Return which application is being built, and since when."""
        return self._stage

    async def start(self) -> dict[str, Any]:
        """Build the applications in order; return for each its spec, or its error."""
        results = await self._in_thread(partial(self._build_all, asyncio.get_running_loop()))
        for built in results:
            for each in () if isinstance(built, dict) else built.spec.deployments:
                parcel = Parcel.labelled(each.spec.code)
                if parcel is not None and each.spec.parts:
                    await self._context.cluster.send_parcel(parcel, each.spec.parts)
        plain = [each if isinstance(each, dict) else {"spec": each.spec.to_plain()} for each in results]
        return {"built": plain}

    def _build_all(self, loop: asyncio.AbstractEventLoop) -> list[Any]:
        """Return each application, or its error as plain values; runs in a thread."""
        scan = ModuleScan()
        found: list[Any] = []
        for config in self._configs:
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(self._begin, config)
            try:
                found.append(copy_context().run(_build, config, self._context.spec.instance, scan))
            except UnavailableError:
                raise  # another worker may build it
            except (ServeError, TypeError) as error:
                traceback = getattr(error, "user_traceback", "")
                found.append({"error": str(error), "user_traceback": traceback})
        return found

    def _begin(self, config: Mapping[str, Any]) -> None:
        what = f"building {config['name']!r} from {config['import_path']!r}"
        self._stage = (what, self._context.clock.now())

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        """Run a function in a thread that does not keep the process alive, even if it never returns.

        All applications are built in one thread, because switching between threads takes up to 5 ms during a
        build.
        """
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Any] = loop.create_future()

        def resolve(setting: Callable[[Any], None], value: Any) -> None:
            if not outcome.done():
                setting(value)

        def run() -> None:
            try:
                setting, value = outcome.set_result, function()
            except Exception as error:
                setting, value = outcome.set_exception, error
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(resolve, setting, value)

        # Dask's get_worker() works in the user's module because of this context.
        start_daemon("daskserve-build", partial(copy_context().run, run))
        return await outcome

    async def stop(self, grace_s: float) -> None:
        """Do nothing: code that is being imported cannot be interrupted."""

    def handle(self, envelope: Envelope) -> ActorRequest:
        raise BadRequestError("An application builder does not accept requests.")

    def samples(self) -> list[MetricSample]:
        """Return no metrics."""
        return []


def _build(config: Mapping[str, Any], instance: str, scan: ModuleScan) -> Any:
    # Imported here, because only workers that build applications need the client's code.
    from daskserve.client.definitions.code_digest import shares_ids
    from daskserve.client.hosting.building import build_configured
    from daskserve.config_file.model import ApplicationConfig

    shares_ids.set(True)
    try:
        return build_configured(ApplicationConfig(**config), instance, None, scan)
    except BaseException as error:
        if isinstance(error, Exception):
            raise
        # If raised on the worker's event loop, it would stop the loop or count as a cancellation.
        text = f"The code raised {type(error).__name__} while it was imported; correct it."
        raise ReplicaStartError(text) from None
