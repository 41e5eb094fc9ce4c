"""Begins to trace an instance in a process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from daskserve.telemetry.tracing.process import KEY, Tracing


def enable(
    context: Any,
    config: Mapping[str, Any],
    call_imported: Callable[[str, str], Any],
    post_of: Callable[[Any], Callable[[bytes], bool] | None],
) -> Tracing | None:
    """Begin to trace an instance in this process, unless its configuration says otherwise; idempotent.

    Parameters
    ----------
    context : ActorContext
        The context of an actor of the instance.
    call_imported, post_of : callable
        See `daskserve.telemetry.tracing.export.open_export`.
    """
    if not config.get("enabled"):
        return None
    shared = context.cluster.shared
    found: Tracing | None = shared.get(KEY)
    if found is None:
        instance = context.spec.instance
        resource = {"service.name": instance, "process.pid": os.getpid(), "daskserve.worker": context.worker}
        found = shared[KEY] = Tracing(instance, config, resource, call_imported, post_of)
        found.start()
        # Requests need these modules, too, and no request should wait for an import.
        import_module("daskserve.telemetry.tracing.routing")
        from daskserve.telemetry.tracing.user import watch_user_spans

        watch_user_spans(found.queue)
    return found
