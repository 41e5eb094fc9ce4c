"""What a scaler outside of the cluster may ask for; see ``external_scaler_enabled`` in `BackendConfig`."""

from __future__ import annotations

import json
from typing import Any

from daskserve.errors import BadRequestError

#: More replicas than that are nobody's wish but a mistake; the controller would be busy with them for long.
MOST_REPLICAS = 10_000
#: The key under which a request has the number, which is that of Ray Serve.
KEY = "target_num_replicas"


def checked_number(value: Any) -> int:
    """Return a number of replicas that somebody wants.

    Raises
    ------
    BadRequestError
        It is none that there may be. As with ``num_replicas``, that is also zero.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        shown = repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:40]}..."
        raise BadRequestError(f"{KEY} is {shown}; it has to be a whole number of replicas")
    if not 1 <= value <= MOST_REPLICAS:
        shown = str(value) if abs(value) <= 10**15 else "beyond all bounds"
        raise BadRequestError(
            f"{KEY} is {shown}; it has to be from 1 to {MOST_REPLICAS}, as with num_replicas: only "
            "autoscaling_config lets a backend have none"
        )
    return value


def number_in(body: bytes) -> int:
    """Return the number of replicas that the body of a request wants.

    Raises
    ------
    BadRequestError
        The body is not JSON, or has no such number.
    """
    example = f'{{"{KEY}": 3}}'
    try:
        wanted: Any = json.loads(body)
    except (ValueError, RecursionError):
        raise BadRequestError(f"the body is not JSON; send {example}") from None
    if not isinstance(wanted, dict) or KEY not in wanted:
        raise BadRequestError(f"the body has no {KEY}; send {example}")
    return checked_number(wanted[KEY])
