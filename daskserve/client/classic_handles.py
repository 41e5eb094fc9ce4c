"""The handles of the classic system: a blocking one, and one for event loops."""

from __future__ import annotations

from daskserve.client.warning import warn_caller
from daskserve.data.caller.calls.async_handle import awaited
from daskserve.data.caller.calls.handle import Handle
from daskserve.internals.ipython import in_cell
from daskserve.loops.event_loop import running_loop


def classic_handle(handle: Handle, sync: bool) -> Handle:
    """Return a handle in one of the two classic forms; warn if that form does not suit the calling
    context."""
    is_in_loop = running_loop() is not None
    if sync and is_in_loop and not in_cell():
        warn_caller(
            "You requested a handle with sync=True inside an event loop; .result() would block it. "
            "Await its responses, or use sync=False."
        )
    elif not sync and not is_in_loop:
        warn_caller(
            "You requested a handle with sync=False outside an event loop; its calls can only be awaited "
            "inside one. Use sync=True and .result() in blocking code."
        )
    return handle if sync else awaited(handle)
