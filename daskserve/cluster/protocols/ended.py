"""The error of calls after the program has ended the last instance on its cluster."""

from __future__ import annotations

from daskserve.errors import ClosedError


def ended_error() -> ClosedError:
    """Return the error of a call on an instance that this program has shut down, with its connection."""
    return ClosedError(
        "This program has shut down the instance that the call is for. Deploy again, with serve.run(...), "
        "and use the handle that it returns."
    )
