"""The recorded specs of deployments, for clients that deploy them again. Pure."""

from __future__ import annotations

from typing import Any

from daskserve.common.copying import replace
from daskserve.control.decisions import applications as app_decisions
from daskserve.control.decisions import backends as backend_decisions
from daskserve.control.decisions.failed_deploys import not_found
from daskserve.control.records.records import BackendRecord
from daskserve.control.records.state import State
from daskserve.options.specs import ApplicationSpec, BackendSpec, DeploymentSpec


def stored_deployments(state: State, name: str | None) -> dict[str, dict[str, Any]]:
    """Return the spec, the route and the name of the code of one deployment, or of all, by name.

    Raises
    ------
    NotFoundError
        A `KeyError`: there is no deployment of this name.
    """
    found = {
        tag: _stored(state, backend)
        for tag, backend in (state.backends if name is None else _only(state, name)).items()
        if backend.is_deployment and not backend.is_deleting
    }
    if name is not None and not found:
        raise not_found(state, f"Deployment {name} does not exist.", name)
    return found


def stored_application(state: State, name: str) -> dict[str, Any]:
    """Return an application as it was deployed, and the names of its codes by deployment tag.

    Raises
    ------
    NotFoundError
        There is no such application.
    """
    app = app_decisions.known(state, name)
    deployments = []
    for each, tag in app.deployments.items():
        backend, endpoint = state.backends[tag], state.endpoints.get(tag)
        deployments.append(
            DeploymentSpec(
                name=each,
                spec=_spec_of(state, backend),
                python_methods=() if endpoint is None else endpoint.python_methods,
                needs=backend.needs,
                actors=backend.actors,
                actor_of=backend.actor_of,
            )
        )
    spec = ApplicationSpec(name, app.route, tuple(deployments), app.request_id, None)
    return {"spec": spec.to_plain(), "codes": {tag: state.backends[tag].code_key for tag in app.tags}}


def _spec_of(state: State, backend: BackendRecord) -> BackendSpec:
    code = state.codes.get(backend.code_key)
    # If the code is lost or damaged, the other values can still be listed.
    return backend_decisions.spec_of(backend, b"" if code is None else code.code)


def _only(state: State, name: str) -> dict[str, BackendRecord]:
    backend = state.backends.get(name)
    return {} if backend is None else {name: backend}


def _stored(state: State, backend: BackendRecord) -> dict[str, Any]:
    endpoint = state.endpoints.get(backend.tag)
    spec = replace(_spec_of(state, backend), version=None).to_plain()
    # Users do not set these: facts about the callable, and options that the environment implies.
    spec["config"].pop("internal_metadata", None)
    if backend.env is not None:
        spec["config"].pop("isolation", None)
    return {
        "spec": spec,
        "route": None if endpoint is None else endpoint.route,
        "code_name": backend.code_key,
    }
