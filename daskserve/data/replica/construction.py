"""Constructs and destructs the user's object, on a loop or in a thread."""

from __future__ import annotations

from daskserve.data.replica.servable import Servable
from daskserve.data.replica.wall import Wall


async def construct(wall: Wall, servable: Servable) -> None:
    """Construct the user's object; raises what its constructor raises."""
    # On the loop if it has async code, which may want to make tasks there; on the worker's loop only
    # what cannot run elsewhere.
    if servable.must_be_made_on_loop or (servable.is_async_at_all and not wall.is_on_worker_loop):
        await wall.run_async(servable.construct)
    else:
        await wall.run_sync(servable.construct_in_thread)
    if servable.facts.is_asgi_app:
        await wall.run_async(servable.open)


async def destruct(wall: Wall, servable: Servable) -> None:
    """Destruct the user's object; raises what its destructor raises."""
    if servable.must_be_closed_on_loop or (servable.is_async_at_all and not wall.is_on_worker_loop):
        await wall.run_async(servable.close)
    else:
        await wall.run_sync(servable.close_in_thread)
