"""A reference model of the verbs: a second, much shorter implementation on the wanted state alone.

The simulation compares the store with it. A verb raises `Rejected` or returns the wanted state after it. An
equal state means that the verb changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from daskserve.control.records.records import BackendRecord, CapacityRecord, EndpointRecord


class Rejected(Exception):
    """The verb must be refused and change nothing."""


@dataclass(frozen=True)
class Backend:
    """The wanted state of a backend."""

    version: str
    options: Mapping[str, Any]
    config: Mapping[str, Any]
    user_config: bytes | None
    request_id: str
    is_deployment: bool
    is_deleting: bool = False
    is_forced: bool = False


@dataclass(frozen=True)
class Endpoint:
    """The wanted state of an endpoint."""

    route: str | None
    traffic: Mapping[str, float]
    shadows: Mapping[str, float]
    request_id: str
    is_legacy: bool


@dataclass(frozen=True)
class Capacity:
    """The target capacity of the instance, and the direction of its last change."""

    percent: float | None = None
    direction: str | None = None


@dataclass(frozen=True)
class Wanted:
    """The wanted state of an instance."""

    backends: Mapping[str, Backend] = field(default_factory=dict)
    endpoints: Mapping[str, Endpoint] = field(default_factory=dict)
    capacity: Capacity = Capacity()

    def with_backend(self, tag: str, backend: Backend | None) -> Wanted:
        return replace(self, backends=_with(self.backends, tag, backend))

    def with_endpoint(self, name: str, endpoint: Endpoint | None) -> Wanted:
        return replace(self, endpoints=_with(self.endpoints, name, endpoint))

    def live(self, tag: str) -> Backend | None:
        """Return a backend; None if it is missing or being deleted."""
        found = self.backends.get(tag)
        return None if found is None or found.is_deleting else found


def _with(mapping: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    changed = {name: each for name, each in mapping.items() if name != key}
    if value is not None:
        changed[key] = value
    return changed


def backend_of(record: BackendRecord) -> Backend:
    """Return the wanted state in a stored record."""
    return Backend(
        version=record.version.partition("+")[0],
        options=record.actor_options.to_plain(),
        config={
            name: value for name, value in record.config.to_plain().items() if name != "internal_metadata"
        },
        user_config=record.user_config,
        request_id=record.request_id,
        is_deployment=record.is_deployment,
        is_deleting=record.is_deleting,
        is_forced=record.is_forced,
    )


def capacity_of(record: CapacityRecord | None) -> Capacity:
    """Return the wanted state in a stored record."""
    return Capacity() if record is None else Capacity(record.percent, record.direction)


def endpoint_of(record: EndpointRecord) -> Endpoint:
    """Return the wanted state in a stored record."""
    return Endpoint(
        record.route, dict(record.traffic), dict(record.shadows), record.request_id, record.is_legacy
    )


# ---- the verbs


def _made(spec: Mapping[str, Any], *, is_deployment: bool) -> Backend:
    return Backend(
        version=spec["version"],
        options=spec["actor_options"],
        config=spec["config"],
        user_config=spec["user_config"],
        request_id=spec["request_id"],
        is_deployment=is_deployment,
    )


def create_backend(wanted: Wanted, spec: Mapping[str, Any]) -> Wanted:
    existing = wanted.live(spec["tag"])
    if existing is not None:
        if existing.request_id == spec["request_id"]:
            return wanted
        raise Rejected
    return wanted.with_backend(spec["tag"], _made(spec, is_deployment=False))


def update_backend_config(
    wanted: Wanted,
    tag: str,
    config: Mapping[str, Any],
    user_config: bytes | None,
    sets_user_config: bool,
    timeout_s: float,
) -> Wanted:
    existing = wanted.live(tag)
    if existing is None:
        raise Rejected
    kept = dict(existing.config)
    if config.get("autoscaling_config"):
        kept.pop("num_replicas", None)
    elif "num_replicas" in config and kept.get("autoscaling_config") and "autoscaling_config" not in config:
        raise Rejected
    gangs = kept.get("gang_scheduling_config")
    if gangs and not _are_whole(config, gangs["gang_size"]):
        raise Rejected
    changed = replace(existing, config={**kept, **config})
    if sets_user_config:
        changed = replace(changed, user_config=user_config)
    return wanted.with_backend(tag, changed)


def _are_whole(config: Mapping[str, Any], size: int) -> bool:
    """Return whether a number of replicas, or some number within bounds, is one of whole gangs."""
    scaling = config.get("autoscaling_config")
    if scaling:
        return scaling["max_replicas"] // size * size >= max(1, scaling["min_replicas"])
    return config.get("num_replicas", 0) % size == 0


def deploy(wanted: Wanted, spec: Mapping[str, Any], route: str | None, **_: Any) -> Wanted:
    tag = spec["tag"]
    existing, endpoint = wanted.live(tag), wanted.endpoints.get(tag)
    is_repeated = existing is not None and existing.request_id == spec["request_id"]
    # In the simulation a deployment always has a version, a classic backend never.
    found = existing.version if existing is not None and existing.is_deployment else None
    if spec["prev_version"] not in (None, found) and not is_repeated:
        raise Rejected
    if existing is not None and not is_repeated and not existing.is_deployment:
        raise Rejected
    if any(each.route == route for name, each in wanted.endpoints.items() if name != tag and route):
        raise Rejected
    if endpoint is not None and endpoint.is_legacy:
        raise Rejected
    made = _made(spec, is_deployment=True)
    is_same = existing is not None and replace(made, request_id=existing.request_id) == existing
    after = wanted if is_repeated or is_same else wanted.with_backend(tag, made)
    shadows = {} if endpoint is None else endpoint.shadows
    # A split stays as long as all its backends exist, the deployment's own included.
    is_kept = endpoint is not None and all(wanted.live(each) for each in (tag, *endpoint.traffic))
    traffic = endpoint.traffic if is_kept else {tag: 1.0}
    return after.with_endpoint(tag, Endpoint(route, traffic, shadows, "", False))


def delete_backend(wanted: Wanted, tag: str, force: bool, leaving: str | None = None) -> Wanted:
    existing = wanted.backends.get(tag)
    if existing is None:
        return wanted
    if any(
        tag in each.traffic or tag in each.shadows
        for name, each in wanted.endpoints.items()
        if name != leaving
    ):
        raise Rejected
    is_forced = force or (existing.is_deleting and existing.is_forced)
    return wanted.with_backend(tag, replace(existing, is_deleting=True, is_forced=is_forced))


def delete_deployment(wanted: Wanted, name: str, force: bool) -> Wanted:
    return delete_backend(wanted, name, force, leaving=name).with_endpoint(name, None)


def create_endpoint(
    wanted: Wanted, name: str, route: str | None, backend: str, request_id: str, **_: Any
) -> Wanted:
    existing = wanted.endpoints.get(name)
    if existing is not None and existing.request_id == request_id:
        return wanted
    is_taken = any(each.route == route for each in wanted.endpoints.values() if route)
    if existing is not None or is_taken or wanted.live(backend) is None:
        raise Rejected
    return wanted.with_endpoint(name, Endpoint(route, {backend: 1.0}, {}, request_id, True))


def delete_endpoint(wanted: Wanted, name: str) -> Wanted:
    return wanted.with_endpoint(name, None)


def set_traffic(wanted: Wanted, name: str, traffic: Mapping[str, float]) -> Wanted:
    existing = wanted.endpoints.get(name)
    if existing is None or any(wanted.live(tag) is None for tag in traffic):
        raise Rejected
    return wanted.with_endpoint(name, replace(existing, traffic=dict(traffic)))


def shadow_traffic(wanted: Wanted, name: str, backend: str, proportion: float) -> Wanted:
    existing = wanted.endpoints.get(name)
    if existing is None or wanted.live(backend) is None:
        raise Rejected
    shadows = _with(existing.shadows, backend, proportion or None)
    return wanted.with_endpoint(name, replace(existing, shadows=shadows))


def set_target_capacity(wanted: Wanted, percent: float | None) -> Wanted:
    former = wanted.capacity.percent
    if percent == former:
        return wanted
    is_new = former is None and not any(wanted.live(tag) for tag in wanted.backends)
    if percent is None or (percent == 100 and former is None and not is_new):
        return replace(wanted, capacity=Capacity(percent, None))
    is_more = is_new or percent > (100 if former is None else former)
    return replace(wanted, capacity=Capacity(percent, "UP" if is_more else "DOWN"))


def withdraw(wanted: Wanted, requests: Sequence[str]) -> Wanted:
    """Change nothing: a withdrawn change is checked like any failed change."""
    return wanted


VERBS: Mapping[str, Callable[..., Wanted]] = {
    verb.__name__: verb
    for verb in (
        create_backend,
        create_endpoint,
        delete_backend,
        delete_deployment,
        delete_endpoint,
        deploy,
        set_target_capacity,
        set_traffic,
        shadow_traffic,
        update_backend_config,
        withdraw,
    )
}


def after(verb: str, message: Mapping[str, Any], wanted: Wanted) -> Wanted | None:
    """Return the wanted state after a verb; None if the verb must be refused."""
    try:
        return VERBS[verb](wanted, **message)
    except Rejected:
        return None
