"""The verb by which others than an autoscaler say how many replicas a backend has. Pure."""

from __future__ import annotations

from typing import Any

from daskserve.control.records import Change
from daskserve.control.scaled import scaled
from daskserve.control.state import State
from daskserve.errors import ExternalScalerDisabledError, NotFoundError
from daskserve.options.external_scaling import checked_number

REASON = "asked for by the external scaler"


def scale(state: State, tag: str, number: Any, wall: float) -> Change:
    """Return the change that makes a number the wanted one; none if it is so already.

    Raises
    ------
    BadRequestError
        There cannot be so many.
    NotFoundError
        There is no such backend.
    ExternalScalerDisabledError
        It does not let others say how many replicas it has.
    """
    backend = state.backends.get(tag)
    if backend is None or backend.is_deleting:
        known = ", ".join(sorted(each.tag for each in state.backends.values() if not each.is_deleting))
        raise NotFoundError(f"There is no backend or deployment '{tag}'; there are: {known or 'none'}.")
    if not backend.is_scaled_externally:
        raise ExternalScalerDisabledError(
            f"Backend '{tag}' is not scaled from outside; set external_scaler_enabled=True in its config to "
            "let others say how many replicas it has."
        )
    wanted = checked_number(number)
    if wanted == backend.full_replicas:
        return {}
    changed = scaled(backend, wanted, REASON, wall)
    return {changed.key: changed}
