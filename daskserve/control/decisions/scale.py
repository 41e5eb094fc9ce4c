"""The number of replicas that an external scaler sets. Pure."""

from __future__ import annotations

from daskserve.common.formatting import capitalized
from daskserve.common.types import DEFAULT_APPLICATION, BackendTag
from daskserve.control.decisions import backends as backend_decisions
from daskserve.control.records.records import BackendRecord, Change
from daskserve.control.records.state import State
from daskserve.control.scaling.recorded import scaled
from daskserve.errors import BadRequestError, ExternalScalerDisabledError, NotFoundError

REASON = "asked for by the external scaler"


def scale(
    state: State, name: str, number: int, wall: float, *, application: str = "", by: str = ""
) -> Change:
    """Return the change that sets the target number; an empty change if it is already set.

    The client or the scheduler's HTTP route has checked the number.

    Parameters
    ----------
    application : str
        The application of the deployment ``name``; if ``name`` is empty, its ingress is scaled. Backends, and
        deployments outside of applications, count as part of the default application, or of an application
        with their own name. If ``application`` is empty, ``name`` is a tag, or an application whose ingress
        is scaled.
    by : str
        The operator, who may scale any deployment without an autoscaler; empty for an external scaler.

    Raises
    ------
    NotFoundError
        There is no such backend or deployment.
    ExternalScalerDisabledError
        The backend or deployment does not allow external scaling.
    """
    backend = named_deployment(state, name, application)
    if by and backend.autoscaling is not None and not backend.autoscaling.dry_run:
        raise BadRequestError(
            f"{capitalized(backend.display_name)} is autoscaled, so the number would not last; change "
            "min_replicas and max_replicas of its autoscaling_config instead."
        )
    if not by and not backend.is_scaled_externally:
        raise ExternalScalerDisabledError(
            f"{capitalized(backend.display_name)} does not allow external scaling; set "
            "external_scaler_enabled=True in its config, or in serve.run()."
        )
    if number == backend.full_replicas:
        return {}
    changed = scaled(backend, number, f"asked for by {by}" if by else REASON, wall)
    return {changed.key: changed}


def named_deployment(state: State, name: str, application: str = "") -> BackendRecord:
    """Return the backend that the arguments of `scale` name; raise `NotFoundError` if there is none.

    The name of an application alone means its ingress, unless a backend has that name.
    """
    app = state.apps.get(name)
    if not application and name not in state.backends and app is not None and app.deployments:
        return backend_decisions.find(state, app.ingress)
    return backend_decisions.find(state, tag_of(state, name, application) if application else name)


def tag_of(state: State, name: str, application: str) -> BackendTag:
    """Return the tag of an application's deployment; raise `NotFoundError` if there is none."""
    app = state.apps.get(application)
    if not name and app is not None and app.deployments:
        return app.ingress
    own = {} if app is None else {n: tag for n, tag in app.deployments.items() if not _is_actor(state, tag)}
    if name in own:
        return own[name]
    backend = state.backends.get(name)
    if backend is not None and not backend.application and application in (DEFAULT_APPLICATION, name):
        return name
    if not own:
        known = ", ".join(sorted(each.name for each in state.apps if each.deployments)) or "none"
        what = f" with a deployment {name!r}" if name else ""
        raise NotFoundError(
            f"There is no application {application!r}{what}; the applications are: {known}. Backends and "
            f"deployments without an application are in {DEFAULT_APPLICATION!r}."
        )
    raise NotFoundError(f"Application {application!r} has no deployment {name!r}; it has: {', '.join(own)}.")


def _is_actor(state: State, tag: BackendTag) -> bool:
    backend = state.backends.get(tag)
    return backend is not None and bool(backend.actor_of)
