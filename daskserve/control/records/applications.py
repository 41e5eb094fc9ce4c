"""The applications of an instance, with indexes from their backends and routes. Part of `State`."""

from __future__ import annotations

from collections.abc import Iterator, Set

from daskserve.common.types import BackendTag
from daskserve.control.records.records import AppRecord, BackendRecord
from daskserve.options.routing.route_variables import shape_of


class Applications:
    """The records of the applications, indexed by backend and route. Only `State.apply` changes it."""

    def __init__(self) -> None:
        self._records: dict[str, AppRecord] = {}
        self._members: dict[str, dict[BackendTag, None]] = {}
        self._needed_by: dict[BackendTag, dict[BackendTag, None]] = {}
        self._by_route: dict[str, str] = {}

    def __iter__(self) -> Iterator[AppRecord]:
        return iter(self._records.values())

    def __len__(self) -> int:
        return len(self._records)

    def get(self, name: str) -> AppRecord | None:
        """Return the record of an application; None if there is none."""
        return self._records.get(name)

    def of(self, backend: BackendRecord) -> AppRecord | None:
        """Return the application that a backend is a deployment of; None if there is none."""
        app = self._records.get(backend.application)
        return app if app is not None and backend.tag in app.deployments.values() else None

    def members(self, name: str) -> Set[BackendTag]:
        """Return the backends of an application, including those that it no longer needs."""
        return self._members.get(name, {}).keys()

    def needed_by(self, tag: BackendTag) -> Set[BackendTag]:
        """Return the backends that call this one."""
        return self._needed_by.get(tag, {}).keys()

    def at_route(self, route: str) -> str | None:
        """Return the application that has or will get a route that matches the same paths."""
        return self._by_route.get(shape_of(route))

    def keep(self, app: AppRecord) -> None:
        """Add a record."""
        self._records[app.name] = app
        if app.route is not None and not app.is_deleting:
            self._by_route[shape_of(app.route)] = app.name

    def forget(self, name: str) -> None:
        """Remove a record."""
        app = self._records.pop(name, None)
        if app is not None and app.route is not None and self._by_route.get(shape_of(app.route)) == name:
            del self._by_route[shape_of(app.route)]

    def add(self, backend: BackendRecord) -> None:
        """Index a backend."""
        if backend.application:
            self._members.setdefault(backend.application, {})[backend.tag] = None
            for need in backend.needs:
                self._needed_by.setdefault(need, {})[backend.tag] = None

    def remove(self, backend: BackendRecord) -> None:
        """Remove a backend from the index."""
        if backend.application:
            drop(self._members, backend.application, backend.tag)
            for need in backend.needs:
                drop(self._needed_by, need, backend.tag)


def drop(index: dict[str, dict[str, None]], key: str, name: str) -> None:
    """Remove a name from an index of names by key."""
    names = index.get(key, {})
    names.pop(name, None)
    if not names:
        index.pop(key, None)
