"""Ends what a program has started on an instance, when the program stops serving."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Mapping
from typing import Any

from daskserve.client.serving.serve_forever import print_line
from daskserve.client.verbs.applications import ApplicationVerbs
from daskserve.common.formatting import shown
from daskserve.common.types import DEFAULT_INSTANCE
from daskserve.errors import ClosedError, DeployError, NotRunningError, RequestTimeoutError, ServeError

#: Timeout for the numbers of open requests.
ANSWER_S = 2.0


async def leave_instance(verbs: ApplicationVerbs, started: Mapping[str, str], signal_name: str = "") -> None:
    """End the parts of an instance that this program has started, and close the connection.

    1. This program's own instance ends, unless other programs have deployed something on it.
    2. Otherwise only the applications that this program has started end, if no other call has changed them
       since. An instance that several programs have shared ends with the last application.
    3. A client of `daskserve.connect` ends nothing.

    Parameters
    ----------
    started
        The ids of the calls that have started applications, by application.
    signal_name
        The signal that ends the program, if any: then the numbers of open requests are printed.
    """
    connection, asynchronous = verbs._connection, verbs._asynchronous
    cluster_connection, instance = connection.cluster_connection, connection.instance
    is_own = instance in cluster_connection.started and not connection.is_guest
    ends = is_own and (
        not cluster_connection.is_open or await verbs._run(cluster_connection.started.is_alone(instance))
    )
    if signal_name and cluster_connection.is_open:
        await _print_open_requests(verbs, signal_name, None if ends else started)
    failure: ServeError | None = None
    if not ends and cluster_connection.is_open and not connection.is_guest:
        try:
            for name, request_id in started.items():
                try:
                    await verbs._delete_application(name, request_id)
                except (DeployError, RequestTimeoutError) as error:
                    failure = error  # the others are deleted anyway
            ends = await _is_left_over(verbs, is_own=is_own)
        except (ClosedError, NotRunningError):
            ends = is_own  # the instance has ended already; clean up this process
    if ends:
        await connection.shutdown(asynchronous=asynchronous)
    else:
        await connection.disconnect(asynchronous=asynchronous)
    if failure is not None:
        raise failure


async def _print_open_requests(
    verbs: ApplicationVerbs, signal_name: str, names: Container[str] | None
) -> None:
    """Print the numbers of open requests: of some applications, or (None) of all."""

    async def ask() -> Mapping[str, Any]:
        async with asyncio.timeout(ANSWER_S):
            return dict(await verbs._connection.calls.call("ongoing"))

    try:
        answer = await verbs._run(ask())
    except (ServeError, OSError):
        answer = {"requests": {}}  # do not wait while the controller is being replaced
    counts = {name: count for name, count in answer["requests"].items() if names is None or name in names}
    line = f"Stopping ({signal_name})."
    if counts:
        open_requests = ", ".join(
            f"{count} of {name!r}" if name else str(count) for name, count in counts.items()
        )
        line = (
            f"Stopping ({signal_name}): waiting up to {shown(answer['limit_s'])} s for open requests and "
            f"streams ({open_requests}). Ctrl-C or another SIGTERM ends them at once."
        )
    print_line(verbs._connection.cluster_connection, line)


async def _is_left_over(verbs: ApplicationVerbs, *, is_own: bool) -> bool:
    """Return whether an instance without an owner has no deployments left."""
    instance = verbs._connection.instance
    facts = (await verbs._run(verbs._connection.cluster_connection.ask("instances"))).get(instance)
    is_detached = instance == DEFAULT_INSTANCE and not is_own
    if facts is None or facts["owner"] is not None or is_detached:
        return False
    backends = (await verbs._call("status"))["backends"].values()
    return all(each["status"] == "DELETING" for each in backends)
