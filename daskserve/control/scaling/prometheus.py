"""Values of PromQL expressions, kept fresh for policies. Who speaks HTTP is an argument: see `fetching`."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlencode

from daskserve.clock import Clock

logger = logging.getLogger("daskserve.autoscaling.context")

#: Returns the body of the response to a GET, and raises an `OSError` or `ValueError` if there is none.
Fetch = Callable[[str], Awaitable[bytes]]


class PrometheusQueries:
    """Asks a Prometheus server for the values of some expressions, again and again.

    Parameters
    ----------
    address : str
        Where the server answers, such as ``http://prometheus:9090``; a path before ``/api`` is kept.
    queries : mapping
        The expressions by name.
    fetch : callable
        Gets a URL.
    clock : Clock
        Says how old a value is.
    interval_s, max_age_s : float
        How often to ask, and the age from which a value counts no more.
    """

    def __init__(
        self,
        address: str,
        queries: Mapping[str, str],
        *,
        fetch: Fetch,
        clock: Clock,
        interval_s: float = 5.0,
        max_age_s: float = 15.0,
    ) -> None:
        self.queries = dict(queries)
        self._url = f"{address.rstrip('/')}/api/v1/query"
        self._fetch = fetch
        self._clock = clock
        self._interval_s = interval_s
        self._max_age_s = max_age_s
        self._values: dict[str, tuple[float, float]] = {}
        self._errors: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} fresh={len(self.values())}/{len(self.queries)}>"

    def values(self) -> dict[str, float]:
        """Return the values that are not too old, by name."""
        oldest = self._clock.now() - self._max_age_s
        return {name: value for name, (value, at) in self._values.items() if at >= oldest}

    def errors(self) -> dict[str, str]:
        """Return what went wrong with the newest try of each expression, by name."""
        return dict(self._errors)

    async def run(self) -> None:
        """Ask at once and then at every interval, until cancelled."""
        while True:
            await self.refresh()
            await self._clock.sleep(self._interval_s)

    async def refresh(self) -> None:
        """Ask for all expressions at once. What fails is logged when it begins, and keeps its last value."""
        await asyncio.gather(*(self._ask(name, text) for name, text in self.queries.items()))

    async def _ask(self, name: str, text: str) -> None:
        # The age of a value is counted from when it was asked for, not from when the answer came.
        at = self._clock.now()
        try:
            async with asyncio.timeout(self._max_age_s):
                body = await self._fetch(f"{self._url}?{urlencode({'query': text})}")
            self._values[name] = (value_of(body), at)
        except (OSError, ValueError) as error:
            if self._errors.get(name) != str(error):
                logger.warning("query %r (%s) has no value: %s", name, text, error)
            self._errors[name] = str(error) or type(error).__name__
        else:
            self._errors.pop(name, None)


def value_of(body: bytes) -> float:
    """Return the one number in the server's answer to a query.

    Raises
    ------
    ValueError
        There is none, or more than one; the message says what to change.
    """
    try:
        answer: Any = json.loads(body)
    except ValueError:
        raise ValueError("the answer is not JSON; is that the address of a Prometheus server?") from None
    if not isinstance(answer, dict) or answer.get("status") != "success":
        said = answer.get("error") if isinstance(answer, dict) else None
        raise ValueError(f"Prometheus refused it: {said or 'no reason given'}")
    try:
        data = answer["data"]
        kind, result = data["resultType"], data["result"]
        if kind == "vector":
            if len(result) != 1:
                found = "no series" if not result else f"{len(result)} series"
                raise ValueError(f"it gives {found}, not one; wrap it in sum(...) or max(...)")
            result = result[0]["value"]
        elif kind != "scalar":
            raise ValueError(f"it gives a {kind}; write an expression of one value at one time")
        value = float(result[1])
    except (KeyError, TypeError, IndexError):
        raise ValueError("the answer is not that of Prometheus' /api/v1/query") from None
    if not math.isfinite(value):
        raise ValueError(f"it gives {value}, which is no number to scale by")
    return value
