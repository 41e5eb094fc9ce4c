"""The threads in which FastAPI and Starlette run the plain functions of an application.

AnyIO allows 40 of them for each event loop, whatever a replica may run at a time. Each slot of a replica adds
one, so a request that has a slot never waits for a thread of another one.
"""

from __future__ import annotations

from anyio.to_thread import current_default_thread_limiter


async def add_threads(count: int) -> None:
    """Allow more threads to the loop that runs this, or fewer if the number is negative."""
    current_default_thread_limiter().total_tokens += count
