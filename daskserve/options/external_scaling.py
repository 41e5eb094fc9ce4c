"""Check the requests of an external scaler; see ``external_scaler_enabled`` in `BackendConfig`."""

from __future__ import annotations

import json
from typing import Any

from daskserve.common.formatting import as_whole
from daskserve.errors import BadRequestError

#: Largest accepted number. A larger one is probably a mistake and would keep the controller busy for long.
MOST_REPLICAS = 10_000
#: The key of the number in a request, as in Ray Serve.
KEY = "target_num_replicas"


def checked_number(value: Any) -> int:
    """Return the requested number of replicas if it is allowed.

    Raises
    ------
    BadRequestError
        The number is not allowed. As with ``num_replicas``, zero is not allowed either.
    """
    number = as_whole(value)
    if number is None:
        shown = repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:40]}..."
        raise BadRequestError(f"{KEY} is {shown}; give a whole number of replicas")
    if not 1 <= number <= MOST_REPLICAS:
        shown = str(number) if abs(number) <= 10**15 else "out of range"
        raise BadRequestError(
            f"{KEY} is {shown}; give a number from 1 to {MOST_REPLICAS}; only autoscaling_config allows 0 "
            "replicas"
        )
    return number


def number_in(body: bytes) -> int:
    """Return the number of replicas in the body of a request.

    Raises
    ------
    BadRequestError
        The body is not JSON, has no number, or the number is not allowed.
    """
    example = f'{{"{KEY}": 3}}'
    try:
        wanted: Any = json.loads(body)
    except (ValueError, RecursionError):
        raise BadRequestError(f"the body is not JSON; send {example}") from None
    if not isinstance(wanted, dict) or KEY not in wanted:
        raise BadRequestError(f"the body has no {KEY}; send {example}")
    return checked_number(wanted[KEY])
