"""The errors of calls on a connection that has ended."""

from __future__ import annotations

from daskserve.errors import ClosedError, ClusterUnreachableError


def ended_error() -> ClosedError:
    """Return the error for a call on an instance that this program has shut down, including its
    connection."""
    return ClosedError(
        "This program has shut down the instance that the call is for. Deploy again, with serve.run(...), "
        "and use the handle that it returns."
    )


def forked_error(hint: str) -> ClusterUnreachableError:
    """Return the error for a call on a connection of the process from which this one was forked."""
    return ClusterUnreachableError(
        "This process was forked, and the connection that it has inherited works only in its parent process. "
        f"{hint}"
    )
