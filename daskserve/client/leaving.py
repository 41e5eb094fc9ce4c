"""What a program that serves ends when it ends: what it has started, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping

from daskserve.client.application_verbs import ApplicationVerbs
from daskserve.errors import ClosedError, NotRunningError
from daskserve.types import DEFAULT_INSTANCE


async def leave_instance(verbs: ApplicationVerbs, started: Mapping[str, str]) -> None:
    """End what this program has started on an instance, and close the connection.

    1. This program's own instance ends, unless other programs have deployed something on it.
    2. Otherwise only the applications end that this program has started, if no other call has changed them
       since. An instance that several programs have shared ends with the last application.
    3. A client of `daskserve.connect` ends nothing.

    Parameters
    ----------
    started
        The ids of the calls that have started applications, by application.
    """
    connection, asynchronous = verbs._connection, verbs._asynchronous
    link, instance = connection.link, connection.instance
    is_own = instance in link.started and not connection.is_guest
    ends = is_own and (not link.is_open or await verbs._run(link.started.is_alone(instance)))
    if not ends and link.is_open and not connection.is_guest:
        try:
            for name, request_id in started.items():
                await verbs._delete_application(name, request_id)
            ends = await _is_left_over(verbs, is_own=is_own)
        except (ClosedError, NotRunningError):
            ends = is_own  # it has ended already, and leaves only what this process has of it
    if ends:
        await connection.shutdown(asynchronous=asynchronous)
    else:
        await connection.disconnect(asynchronous=asynchronous)


async def _is_left_over(verbs: ApplicationVerbs, *, is_own: bool) -> bool:
    """Return whether an instance belongs to no program any more, and serves nothing."""
    instance = verbs._connection.instance
    facts = (await verbs._run(verbs._connection.link.ask("instances"))).get(instance)
    is_detached = instance == DEFAULT_INSTANCE and not is_own
    if facts is None or facts["owner"] is not None or is_detached:
        return False
    backends = (await verbs._call("status"))["backends"].values()
    return all(each["status"] == "DELETING" for each in backends)
