"""Changes of endpoints: routes, methods, traffic, shadows. Pure: each function returns one, or raises."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

from daskserve.common.copying import replace
from daskserve.common.types import BackendTag, EndpointTag, described, short_tag
from daskserve.control.records.records import AppRecord, Change, EndpointRecord
from daskserve.control.records.state import State
from daskserve.errors import AlreadyRegisteredError, BadRequestError, NotRegisteredError
from daskserve.options.routing.route_variables import has_variables, shape_of


def normalise_route(route: str) -> str:
    """Return a route without trailing slashes, except for the root."""
    return route.rstrip("/") or "/"


def _require_backends(state: State, backends: Sequence[BackendTag]) -> None:
    for backend in backends:
        found = state.backends.get(backend)
        if found is None or found.is_deleting:
            raise NotRegisteredError(
                f"Attempted to assign traffic to a {described(backend, 'backend')} that is not registered."
            )


def _require_endpoint(state: State, name: EndpointTag) -> EndpointRecord:
    endpoint = state.endpoints.get(name)
    if endpoint is None:
        known = ", ".join(sorted(each for each in state.endpoints if each == short_tag(each)))
        raise NotRegisteredError(f"Endpoint '{name}' is not registered; registered: {known or 'none'}.")
    return endpoint


def _holder_of(state: State, route: str | None) -> EndpointRecord | None:
    """Return the endpoint whose route matches the same paths."""
    if route is None:
        return None
    if has_variables(route):
        shape = shape_of(route)
        return next((each for known, each in state.routes().items() if shape_of(known) == shape), None)
    return state.endpoint_at(route)


def _application_of(state: State, endpoint: EndpointRecord) -> str:
    """Return the application that an endpoint belongs to; empty if there is none."""
    backend = None if endpoint.is_legacy else state.backends.get(endpoint.name)
    return "" if backend is None else backend.application


def application_at(state: State, route: str | None) -> str | None:
    """Return the application whose route matches the same paths, or will when its change is complete."""
    if route is None:
        return None
    holder = _holder_of(state, route)
    owner = "" if holder is None else _application_of(state, holder)
    return owner or state.apps.at_route(route)


def circle(state: State, name: str, routes: Mapping[str, str | None]) -> Set[str]:
    """Return the applications that swap routes with an application, including itself; empty if it swaps no
    route.

    ``routes`` are the new routes of the applications that change, by name.
    """
    found: dict[str, None] = {}
    current = name
    while current in routes and current not in found:
        found[current] = None
        route = routes[current]
        current = application_at(state, None if route is None else normalise_route(route)) or ""
    return found.keys() if current == name and len(found) > 1 else frozenset()


def leaving(state: State, name: str, routes: Mapping[str, str | None]) -> Set[str]:
    """Return the applications that give up an application's new route in the same change.

    ``routes`` are the new routes of the applications that change, by name.
    """
    route = normalise_route(routes[name] or "/")
    heir = state.apps.at_route(route) or ""
    gives_up = heir in routes and normalise_route(routes[heir] or "/") != route
    if routes[name] is not None and gives_up and application_at(state, route) == name:
        return frozenset({heir})
    return circle(state, name, routes)


def check_application_route(state: State, route: str | None, *, what: str, application: str = "") -> None:
    """Raise `AlreadyRegisteredError` if another application has or will get a route."""
    owner = application_at(state, route)
    if owner not in (None, application):
        raise AlreadyRegisteredError(
            f"Cannot {what} at route '{route}': it is in use by application '{owner}'. Choose another route, "
            "or delete that application."
        )


def swapping(state: State, app: AppRecord) -> list[AppRecord]:
    """Return the other applications with which an application swaps routes in pending changes.

    They change together: each gets the route of the next one, and the last one gets the route of the first.
    """
    found = [app]
    while True:
        holder = None if found[-1].goal is None else _holder_of(state, found[-1].route)
        owner = None if holder is None else state.apps.get(_application_of(state, holder))
        if owner is app:
            return found[1:]
        if owner is None or owner in found:
            return []
        found.append(owner)


def check_route(
    state: State, route: str | None, *, what: str, application: str, leaving: Collection[str] = ()
) -> None:
    """Raise `AlreadyRegisteredError` unless an application may have a route.

    ``leaving`` are the applications that give up this route in the same change.
    """
    owner, heir = application_at(state, route), None if route is None else state.apps.at_route(route)
    if owner in leaving:
        return
    if owner == application and heir not in (None, application, *leaving):
        raise AlreadyRegisteredError(
            f"Cannot {what} at route '{route}': application '{heir}' is about to take it over in a swap. "
            "Wait for the end of the swap, or deploy both applications."
        )
    check_application_route(state, route, what=what, application=application)
    holder = _holder_of(state, route)
    if holder is not None and application_at(state, route) is None:
        raise AlreadyRegisteredError(
            f"Cannot {what} at route '{route}': it is in use by endpoint '{holder.name}'"
            f"{'' if route == holder.route else f', as {holder.route!r}'}. Choose another route, or delete "
            "that endpoint."
        )


def create_endpoint(
    state: State,
    name: EndpointTag,
    *,
    route: str | None,
    methods: Sequence[str],
    backend: BackendTag,
    request_id: str,
) -> Change:
    """Register an endpoint whose whole traffic goes to one backend; a retried call changes nothing."""
    route = None if route is None else normalise_route(route)
    upper = tuple(sorted({method.upper() for method in methods}))
    existing = state.endpoints.get(name)
    if existing is not None and existing.request_id == request_id:
        return {}
    _require_backends(state, [backend])
    if existing is not None:
        if existing.route == route and existing.methods == upper:
            raise AlreadyRegisteredError(
                f"Route '{route}' is already registered to endpoint '{name}' with methods {list(upper)}. "
                "To set the backend for this endpoint, please use serve.set_traffic()."
            )
        raise AlreadyRegisteredError(
            f"Cannot create endpoint. Endpoint '{name}' is already registered. "
            f"It has route {existing.route!r} and methods {list(existing.methods)}."
        )
    check_application_route(state, route, what=f"create endpoint '{name}'")
    holder = _holder_of(state, route)
    if holder is not None:
        where = "is already registered" if route == holder.route else f"matches the paths of {holder.route!r}"
        raise AlreadyRegisteredError(f"Cannot create endpoint. Route '{route}' {where}.")
    record = EndpointRecord(name, route, upper, {backend: 1.0}, request_id=request_id)
    return {record.key: record}


def deploy_endpoint(
    state: State,
    name: EndpointTag,
    *,
    route: str | None,
    methods: Sequence[str],
    python_methods: Sequence[str],
) -> Change:
    """Create a deployment's endpoint, or change its route. Its backend has the same name.

    The endpoint keeps its shadows. It keeps its traffic policy if all backends in the policy exist.
    """
    route = None if route is None else normalise_route(route)
    check_application_route(state, route, what=f"deploy '{name}'")
    holder = _holder_of(state, route)
    if holder is not None and holder.name != name:
        raise AlreadyRegisteredError(
            f"Cannot deploy '{name}' at route '{route}': endpoint '{holder.name}' is registered there"
            f"{'.' if route == holder.route else f', as {holder.route!r}.'}"
        )
    return deployed_endpoint(state, name, route=route, methods=methods, python_methods=python_methods)


def deployed_endpoint(
    state: State,
    name: EndpointTag,
    *,
    route: str | None,
    methods: Sequence[str],
    python_methods: Sequence[str],
) -> Change:
    """Return the change to the endpoint of a deployment, whose route is known to be free."""
    existing = state.endpoints.get(name)
    if existing is not None and existing.is_legacy:
        raise AlreadyRegisteredError(
            f"Cannot deploy '{name}': a classic endpoint of that name is registered; delete it first."
        )
    is_kept = existing is not None and _is_live(state, name, *existing.traffic)
    record = EndpointRecord(
        name=name,
        route=route,
        methods=tuple(sorted(methods)),
        traffic=existing.traffic if existing is not None and is_kept else {name: 1.0},
        shadows={} if existing is None else existing.shadows,
        is_legacy=False,
        python_methods=tuple(python_methods),
    )
    return {} if record == existing else {record.key: record}


def _is_live(state: State, *backends: BackendTag) -> bool:
    found = [state.backends.get(each) for each in backends]
    return all(each is not None and not each.is_deleting for each in found)


def routed_as_before(state: State, before: EndpointRecord) -> Change:
    """Restore a deployment's endpoint to its previous route and methods, and keep its current traffic.

    Nothing changes if another endpoint has the route now, or this endpoint was removed.
    """
    existing = state.endpoints.get(before.name)
    holder = _holder_of(state, before.route)
    if existing is None or existing.is_legacy or (holder is not None and holder.name != before.name):
        return {}
    record = replace(
        existing, route=before.route, methods=before.methods, python_methods=before.python_methods
    )
    return {} if record == existing else {record.key: record}


def delete_endpoint(state: State, name: EndpointTag) -> Change:
    """Remove an endpoint but not its backends; ignore an unknown name.

    Raises
    ------
    BadRequestError
        It belongs to an application, which needs it.
    """
    endpoint = state.endpoints.get(name)
    if endpoint is None:
        return {}
    owner = _application_of(state, endpoint)
    if owner and state.apps.get(owner) is not None:
        raise BadRequestError(
            f"Endpoint '{name}' is a part of application '{owner}' and cannot be deleted alone. Delete the "
            "application, or run it with route_prefix=None, which removes its route."
        )
    return {endpoint.key: None}


def set_traffic(state: State, name: EndpointTag, traffic: Mapping[BackendTag, float]) -> Change:
    """Replace an endpoint's traffic policy."""
    endpoint = _require_endpoint(state, name)
    check_weights(traffic)
    _require_backends(state, list(traffic))
    changed = replace(endpoint, traffic={tag: float(weight) for tag, weight in traffic.items()})
    return {} if changed == endpoint else {changed.key: changed}


def check_weights(traffic: Mapping[BackendTag, float]) -> None:
    """Raise `BadRequestError` unless the weights are in 0..1 and sum to 1."""
    for tag, weight in traffic.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight <= 1:
            raise BadRequestError(
                f"Traffic weight of {described(tag, 'backend')} must be in 0..1, got {weight!r}."
            )
    total = sum(traffic.values())
    if not math.isclose(total, 1, rel_tol=0, abs_tol=1e-6):
        raise BadRequestError(f"Traffic weights must sum to 1, got {round(total, 9)} for {dict(traffic)}.")


def shadow_traffic(state: State, name: EndpointTag, backend: BackendTag, proportion: float) -> Change:
    """Copy a share of an endpoint's requests to a backend and drop its responses; 0 ends this."""
    endpoint = _require_endpoint(state, name)
    _require_backends(state, [backend])
    shadows = {tag: share for tag, share in endpoint.shadows.items() if tag != backend}
    if proportion:
        shadows[backend] = float(proportion)
    changed = replace(endpoint, shadows=shadows)
    return {} if changed == endpoint else {changed.key: changed}


def published(endpoint: EndpointRecord | None) -> Any:
    """Return the published value of an endpoint for routers; None if it was removed."""
    if endpoint is None:
        return None
    return {
        "traffic": dict(endpoint.traffic),
        "shadows": dict(endpoint.shadows),
        "legacy": endpoint.is_legacy,
        "python_methods": list(endpoint.python_methods),
        "route": endpoint.route,
    }


def routes(state: State) -> dict[str, Any]:
    """Return the route table; each route of an application comes with the application's name."""
    table: dict[str, Any] = {}
    for route, endpoint in state.routes().items():
        table[route] = {"endpoint": endpoint.name, "methods": list(endpoint.methods)}
        application = _application_of(state, endpoint)
        if application:
            table[route]["application"] = application
        access_log = _access_log_of(state, endpoint)
        if access_log is not None:
            table[route]["access_log"] = access_log
    return table


def _access_log_of(state: State, endpoint: EndpointRecord) -> bool | None:
    """Return whether requests are in the access log; None if the deployment has no such option."""
    backend = state.backends.get(endpoint.name)
    config = None if backend is None else backend.config.logging_config
    return None if config is None else config.to_plain().get("enable_access_log")


def published_routes(state: State) -> dict[str, Any]:
    """Return the route table for proxies, with the pending routes of applications that first start."""
    table = routes(state)
    for app in state.apps:
        endpoint = state.endpoints.get(app.ingress)
        if (
            app.route is not None
            and app.route not in table
            and endpoint is not None
            and _is_first(state, app)
        ):
            methods = list(endpoint.methods)
            named = {"endpoint": endpoint.name, "methods": methods, "application": app.name}
            table[app.route] = {**named, "pending": True}
    return table


def _is_first(state: State, app: AppRecord) -> bool:
    """Return whether an application is being deployed and has never been up before."""
    goal = state.goals.get(app.goal or "")
    if goal is None or app.is_deleting:
        return False
    before = goal.previous.get(app.key)
    return before is None or not before["deployments"]
