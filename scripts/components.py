"""The components of the code and the imports between them, as a graph that is read from the sources.

A component is a folder directly in ``daskserve/``, a module directly in it, or ``proxies/``. The modules that
re-export public names are one component, ``handle``. An arrow is an import from one component into another.
The layer of a component is one more than the highest layer that it imports.
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
    """The components and their imports.

    Attributes
    ----------
    imports : mapping
        The components that each component imports.
    """

    imports: Mapping[str, frozenset[str]]

    def layers(self) -> dict[str, int]:
        """Return each component's layer, from 0; raise `ValueError` for a cycle of imports."""
        layers: dict[str, int] = {}
        waiting = set(self.imports)
        while waiting:
            ready = {component for component in waiting if not self.imports[component] & waiting}
            if not ready:
                raise ValueError(f"components that import each other: {', '.join(sorted(waiting))}")
            layers |= {
                component: max((layers[each] + 1 for each in self.imports[component]), default=0)
                for component in ready
            }
            waiting -= ready
        return layers

    def arrows(self) -> list[tuple[str, str]]:
        """Return all pairs of a component and a component that it imports."""
        return sorted((component, other) for component, others in self.imports.items() for other in others)

    def direct(self) -> list[tuple[str, str]]:
        """Return the arrows between components that no longer path connects."""
        below = {component: self._reach(component) for component in self.imports}
        return [
            (component, other)
            for component, other in self.arrows()
            if not any(other in below[between] for between in self.imports[component] if between != other)
        ]

    def _reach(self, component: str) -> set[str]:
        found = set(self.imports[component])
        for each in self.imports[component]:
            found |= self._reach(each)
        return found


def component_of(parts: tuple[str, ...]) -> str:
    """Return the component of a dotted name; the package itself is a component, too."""
    component = parts[1] if len(parts) > 1 else "__init__"
    return "handle" if component in PUBLIC else component


def read_plan() -> Plan:
    """Return the plan of the sources."""
    files = _sources()
    imports: dict[str, set[str]] = {}
    for name, source in files.items():
        component = component_of(name)
        targets = {component_of(target) for target in _targets(source, set(files)) if target[0] == PACKAGE}
        imports.setdefault(component, set()).update(targets - {component})
    return Plan({component: frozenset(others) for component, others in imports.items()})


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
    return Plan({component: frozenset(others) for component, others in imports.items()})


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
