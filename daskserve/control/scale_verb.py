"""The verb with which an external scaler sets a backend's number of replicas. Pure."""

from __future__ import annotations

from daskserve.control.records import Change
from daskserve.control.scaled import scaled
from daskserve.control.state import State
from daskserve.errors import ExternalScalerDisabledError, NotFoundError

REASON = "asked for by the external scaler"


def scale(state: State, tag: str, number: int, wall: float) -> Change:
    """Return the change that sets the target number; an empty change if it is already set.

    The client or the scheduler's HTTP route has checked the number.

    Raises
    ------
    NotFoundError
        There is no such backend.
    ExternalScalerDisabledError
        The backend does not allow external scaling.
    """
    backend = state.backends.get(tag)
    if backend is None or backend.is_deleting:
        known = ", ".join(sorted(each.tag for each in state.backends.values() if not each.is_deleting))
        raise NotFoundError(f"There is no backend or deployment '{tag}'; there are: {known or 'none'}.")
    if not backend.is_scaled_externally:
        raise ExternalScalerDisabledError(
            f"Backend '{tag}' does not allow external scaling; set external_scaler_enabled=True in its "
            "config."
        )
    if number == backend.full_replicas:
        return {}
    changed = scaled(backend, number, REASON, wall)
    return {changed.key: changed}
