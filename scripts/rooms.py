"""The rooms of the code and the imports between them, as a graph that is read from the sources.

A room is a folder directly in ``daskserve/`` seen as a whole, a module directly in it, or ``proxies/``. The
modules that re-export public names are one room, ``handle``.
An arrow is an import from one room into another. A floor is one more than the highest floor that a room
imports.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = "daskserve"
#: Modules that re-export public names, many of them Ray Serve's.
PUBLIC = {"batching", "classic", "config", "exceptions", "handle", "request_router", "schema", "tasks"}
PUBLIC |= {"task_consumer", "task_processor"}


@dataclass(frozen=True)
class Plan:
    """The rooms and what they import.

    Attributes
    ----------
    imports : mapping
        The rooms that each room imports.
    """

    imports: Mapping[str, frozenset[str]]

    def floors(self) -> dict[str, int]:
        """Return each room's floor, from 0; raise `ValueError` if rooms import each other in a circle."""
        floors: dict[str, int] = {}
        waiting = set(self.imports)
        while waiting:
            ready = {room for room in waiting if not self.imports[room] & waiting}
            if not ready:
                raise ValueError(f"rooms that import each other: {', '.join(sorted(waiting))}")
            floors |= {
                room: max((floors[each] + 1 for each in self.imports[room]), default=0) for room in ready
            }
            waiting -= ready
        return floors

    def arrows(self) -> list[tuple[str, str]]:
        """Return all pairs of a room and a room that it imports."""
        return sorted((room, other) for room, others in self.imports.items() for other in others)

    def direct(self) -> list[tuple[str, str]]:
        """Return the arrows between rooms that no longer path connects."""
        below = {room: self._reach(room) for room in self.imports}
        return [
            (room, other)
            for room, other in self.arrows()
            if not any(other in below[between] for between in self.imports[room] if between != other)
        ]

    def _reach(self, room: str) -> set[str]:
        found = set(self.imports[room])
        for each in self.imports[room]:
            found |= self._reach(each)
        return found


def room_of(parts: tuple[str, ...]) -> str:
    """Return the room of a dotted name that starts with the package; the root package is a room, too."""
    room = parts[1] if len(parts) > 1 else "__init__"
    return "handle" if room in PUBLIC else room


def read_plan() -> Plan:
    """Return the plan of the sources."""
    files = _sources()
    imports: dict[str, set[str]] = {}
    for name, source in files.items():
        room = room_of(name)
        targets = {room_of(target) for target in _targets(source, set(files)) if target[0] == PACKAGE}
        imports.setdefault(room, set()).update(targets - {room})
    return Plan({room: frozenset(others) for room, others in imports.items()})


def read_inside(package: str) -> Plan:
    """Return the plan inside a package, such as ``daskserve.control``: its folders and modules."""
    files = _sources()
    outer = tuple(package.split("."))
    size = len(outer)
    imports: dict[str, set[str]] = {}
    for name, source in files.items():
        if name[:size] == outer and len(name) > size:
            targets = {
                target[size]
                for target in _targets(source, set(files))
                if target[:size] == outer and len(target) > size
            }
            imports.setdefault(name[size], set()).update(targets - {name[size]})
    return Plan({room: frozenset(others) for room, others in imports.items()})


def packages() -> list[str]:
    """Return the packages inside the root package that have modules or packages."""
    return sorted({".".join(name[:size]) for name in _sources() for size in range(2, len(name))})


def _sources() -> dict[tuple[str, ...], str]:
    files = {}
    for folder, prefix in ((ROOT / PACKAGE, ()), (ROOT / "proxies", ("proxies",))):
        for path in sorted(folder.rglob("*.py")):
            parts = [PACKAGE, *prefix, *path.relative_to(folder).with_suffix("").parts]
            files[tuple(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return files


def _targets(source: str, modules: set[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    for node in _imports(source):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif node.module:
            base = tuple(node.module.split("."))
            for alias in node.names:
                yield (*base, alias.name) if (*base, alias.name) in modules else base


@functools.cache  # a test looks inside each package
def _imports(source: str) -> tuple[ast.Import | ast.ImportFrom, ...]:
    return tuple(
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)
    )
