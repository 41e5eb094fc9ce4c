"""Poll the values of PromQL expressions for policies. The HTTP client is an argument; see `fetching`."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import urlencode

from daskserve.common.clock import Clock
from daskserve.options.fields.secrets import SecretOption, masked, read_secret

logger = logging.getLogger("daskserve.autoscaling")

#: Returns the response body of a GET; raises an `OSError` or `ValueError` if it fails.
Fetch = Callable[[str], Awaitable[bytes]]


class PrometheusQueries:
    """Polls a Prometheus server for the values of some expressions.

    Parameters
    ----------
    address : str or reference
        Address of the server, such as ``http://prometheus:9090``; a path before ``/api`` is kept. A reference
        to it (`daskserve.options.fields.secrets`) is read before each poll.
    queries : mapping
        The expressions by name.
    fetch : callable
        Gets a URL.
    clock : Clock
        Measures the age of values.
    interval_s, max_age_s : float
        How often to poll, and the age from which a value is stale.
    variables : mapping
        This process's environment variables, to which the address may refer.
    """

    def __init__(
        self,
        address: SecretOption,
        queries: Mapping[str, str],
        *,
        fetch: Fetch,
        clock: Clock,
        interval_s: float = 5.0,
        max_age_s: float = 15.0,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.queries = dict(queries)
        self._address = address
        self._variables = variables
        self._fetch = fetch
        self._clock = clock
        self._interval_s = interval_s
        self._max_age_s = max_age_s
        self._values: dict[str, tuple[float, float]] = {}
        self._errors: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} fresh={len(self.values())}/{len(self.queries)}>"

    def values(self) -> dict[str, float]:
        """Return the values that are not stale, by name."""
        oldest = self._clock.now() - self._max_age_s
        return {name: value for name, (value, at) in self._values.items() if at >= oldest}

    def errors(self) -> dict[str, str]:
        """Return the errors of the last poll, by name of the expression."""
        return dict(self._errors)

    async def run(self) -> None:
        """Poll at once and then at every interval, until cancelled."""
        while True:
            await self.refresh()
            await self._clock.sleep(self._interval_s)

    async def refresh(self) -> None:
        """Poll all expressions concurrently. An expression that fails keeps its last value; a new error is
        logged."""
        await asyncio.gather(*(self._ask(name, text) for name, text in self.queries.items()))

    async def _url(self) -> str:
        address = self._address
        if not isinstance(address, str):
            address = await asyncio.to_thread(read_secret, address, "prometheus_address", self._variables)
        return f"{address.rstrip('/')}/api/v1/query"

    async def _ask(self, name: str, text: str) -> None:
        # A value's age counts from the request, not from the answer.
        at = self._clock.now()
        try:
            url = await self._url()
            async with asyncio.timeout(self._max_age_s):
                body = await self._fetch(f"{url}?{urlencode({'query': text})}")
            self._values[name] = (value_of(body), at)
        except Exception as error:
            # Any answer of a server is tolerated, because the next poll may succeed.
            problem = masked(str(error)) or type(error).__name__
            if self._errors.get(name) != problem:
                logger.warning("Query %r (%s) has no value: %s", name, text, problem)
            self._errors[name] = problem
        else:
            self._errors.pop(name, None)


def value_of(body: bytes) -> float:
    """Return the single number in the server's answer to a query.

    Raises
    ------
    ValueError
        The answer has no number, or more than one; the message says what to change.
    """
    try:
        answer: Any = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("the answer is not JSON; check that a Prometheus server has this address") from None
    if not isinstance(answer, dict) or answer.get("status") != "success":
        said = answer.get("error") if isinstance(answer, dict) else None
        raise ValueError(f"Prometheus refused the query: {said or 'no reason given'}")
    try:
        data = answer["data"]
        kind, result = data["resultType"], data["result"]
        if kind == "vector":
            if not result:
                raise ValueError(
                    "the query gives no series; check its names and labels, or append 'or vector(0)' if none "
                    "means 0"
                )
            if len(result) != 1:
                raise ValueError(
                    f"the query gives {len(result)} series, not one; wrap it in sum(...) or max(...)"
                )
            result = result[0]["value"]
        elif kind != "scalar":
            raise ValueError(f"the query gives a {kind}; write an expression with one value at one time")
        value = float(result[1])
    except OverflowError as error:
        raise ValueError(f"the query gives a number that is too large: {error}") from None
    except (KeyError, TypeError, IndexError):
        raise ValueError(
            "the answer is not that of Prometheus' /api/v1/query; check the address of the server"
        ) from None
    if not math.isfinite(value):
        raise ValueError(f"the query gives {value}; write an expression with a finite value")
    return value
