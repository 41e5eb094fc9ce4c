"""Rules for the import graph: the layers that CONTRIBUTING.md describes.

Every check is a pure function from parsed sources to a list of ``file:line: what is wrong``. Each rule is
tested twice: on the real tree, where it must find nothing, and on a small invalid tree, where it must find
exactly the violation.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tables import each_case

ROOT = Path(__file__).parent.parent

#: A module may import its own layer and layers with a smaller number. A separate rule keeps control and data
#: apart, which share a number, and the other components of `INDEPENDENT`.
LAYERS: Mapping[str, int] = {
    "values": 0,
    "autoscaling": 1,
    "simulation": 2,
    "cluster": 2,
    "control": 3,
    "data": 3,
    "proxies": 4,
    "dashboards": 1,
    "edge": 5,
}
#: The folders of daskserve/, each with its layer.
COMPONENTS: Mapping[str, str] = {
    "common": "values",
    "options": "values",
    "telemetry": "values",
    "loops": "values",
    "internals": "values",
    "payload": "values",
    "config_file": "values",
    "autoscaling": "autoscaling",
    "dashboards": "dashboards",
    "simulation": "simulation",
    "cluster": "cluster",
    "control": "control",
    "data": "data",
    "proxies": "proxies",
    "client": "edge",
    "cli": "edge",
    "openai": "edge",
}
EDGE_MODULES = frozenset(
    {
        "__main__",
        "actors",
        "batching",
        "classic",
        "config",
        "exceptions",
        "handle",
        "request_router",
        "schema",
        "stores",
        "task_consumer",
        "task_processor",
        "tasks",
        "testing",
    }
)
#: Pairs of components that never import each other: they exchange values, like two programs.
INDEPENDENT: Sequence[tuple[str, str]] = (
    ("daskserve.control", "daskserve.data"),
    ("daskserve.data.caller", "daskserve.data.replica"),
    ("daskserve.simulation", "daskserve.control"),
    ("daskserve.simulation", "daskserve.cluster"),
)
#: The modules of daskserve.cluster that components on the request path may import besides its protocols.
SEAM = frozenset(
    {
        "daskserve.cluster.protocols.base",
        # An unpickled handle has no connection, so it must find the connection of its process.
        "daskserve.cluster.worker.current",
        # An isolated replica is not an actor: it runs in a child process of the actor.
        "daskserve.cluster.worker.child",
        "daskserve.cluster.worker.child_view",
    }
)
FACADE = "daskserve"


@dataclass(frozen=True)
class Module:
    """One source file, with the name of its module."""

    name: str
    path: str
    source: str
    is_package: bool


@dataclass(frozen=True)
class Import:
    """One imported name; ``target`` is a module of the tree if the name resolves to one."""

    importer: str
    target: str
    where: str


Tree = Mapping[str, Module]


def read_tree(files: Mapping[str, str]) -> Tree:
    """Return the modules of ``{path relative to the root: source}``."""
    tree = {}
    for path, source in files.items():
        parts = list(Path(path).with_suffix("").parts)
        if parts[0] == "proxies":
            parts.insert(0, FACADE)
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        tree[name] = Module(name, path, source, is_package)
    return tree


def sources() -> dict[str, str]:
    paths = [path for folder in ("daskserve", "proxies") for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


# ---- reading imports


def _targets(node: ast.AST, module: Module, tree: Tree) -> list[str]:
    """Return the absolute names that one statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parts = module.name.split(".")
            parents = parts[: len(parts) - node.level + module.is_package]
            base = ".".join([*parents, *([base] if base else [])])
        # `from package import name`: the name may be a module of that package.
        joined = [f"{base}.{alias.name}" for alias in node.names]
        return [name if name in tree or base == "dask" else base for name in joined]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        function = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
        if function in ("import_module", "__import__"):
            return [str(node.args[0].value)]
    return []


@functools.cache  # each rule reads the whole tree
def _importing(source: str) -> tuple[ast.AST, ...]:
    """Return the nodes of a file that may import something."""
    kinds = (ast.Import, ast.ImportFrom, ast.Call)
    return tuple(node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds))


def imports(tree: Tree) -> list[Import]:
    """Return all imports of all modules."""
    found = []
    for module in tree.values():
        for node in _importing(module.source):
            for target in _targets(node, module, tree):
                line = getattr(node, "lineno", 0)
                found.append(Import(module.name, target, f"{module.path}:{line}"))
    return found


def layer_of(name: str) -> str | None:
    """Return the layer of a module of daskserve; None for the root package and modules without a layer."""
    parts = name.split(".")
    if parts[0] != FACADE or len(parts) == 1:
        return None
    if parts[1] in COMPONENTS:
        return COMPONENTS[parts[1]]
    if len(parts) > 2:
        return None
    return "edge" if parts[1] in EDGE_MODULES else "values"


# ---- the rules


def modules_without_a_layer(tree: Tree) -> list[str]:
    return [
        f"{module.path}:1: {module.name} belongs to no layer"
        for module in tree.values()
        if module.name != FACADE and (layer_of(module.name) is None or _is_new_package(module))
    ]


def _is_new_package(module: Module) -> bool:
    return module.is_package and module.name.split(".")[1] not in COMPONENTS


def imports_to_the_right(tree: Tree) -> list[str]:
    found = []
    for each in imports(tree):
        here, there = layer_of(each.importer), layer_of(each.target)
        if here and there and LAYERS[there] > LAYERS[here]:
            found.append(f"{each.where}: the {here} layer imports {each.target} of the {there} layer")
    return found


def imports_between_strangers(tree: Tree) -> list[str]:
    return [
        f"{each.where}: {each.importer} imports {each.target}"
        for each in imports(tree)
        for one, other in INDEPENDENT
        if (_is_in(each.importer, one) and _is_in(each.target, other))
        or (_is_in(each.importer, other) and _is_in(each.target, one))
    ]


def _is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def imports_of_distributed(tree: Tree) -> list[str]:
    return [
        f"{each.where}: only daskserve/cluster may import {each.target}"
        for each in imports(tree)
        if re.match(r"(dask\.)?distributed(\.|$)", each.target) and layer_of(each.importer) != "cluster"
    ]


def imports_of_the_facade(tree: Tree) -> list[str]:
    return [
        f"{each.where}: import the module that defines the name, not the package root"
        for each in imports(tree)
        if each.target == FACADE and each.importer != FACADE
    ]


def imports_past_the_seam(tree: Tree) -> list[str]:
    return [
        f"{each.where}: {each.importer} may know daskserve.cluster by its protocols only, not {each.target}"
        for each in imports(tree)
        if layer_of(each.importer) in ("data", "proxies")
        and _is_in(each.target, "daskserve.cluster")
        and each.target not in SEAM
    ]


def import_cycles(tree: Tree) -> list[str]:
    """Return one line per group of modules that import each other, at the top, in functions or for types."""
    graph: dict[str, dict[str, str]] = {name: {} for name in tree}
    for each in imports(tree):
        if each.target in tree and each.target != each.importer:
            graph[each.importer].setdefault(each.target, each.where)
    found = []
    for group in _knots({name: set(targets) for name, targets in graph.items()}):
        edges = sorted(where for name in group for target, where in graph[name].items() if target in group)
        found.append(f"{edges[0]}: import cycle of {', '.join(sorted(group))} ({'; '.join(edges)})")
    return found


def _knots(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Return the strongly connected groups of two or more modules."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        to_visit = list(graph[start])
        while to_visit:
            name = to_visit.pop()
            if name not in seen:
                seen.add(name)
                to_visit.extend(graph[name])
        reach[start] = seen
    groups = {frozenset(other for other in reach[name] if name in reach[other]) for name in graph}
    return [set(group) for group in groups if len(group) > 1]


RULES = (
    modules_without_a_layer,
    imports_to_the_right,
    imports_between_strangers,
    imports_of_distributed,
    imports_of_the_facade,
    imports_past_the_seam,
    import_cycles,
)

# ---- the real tree


@pytest.fixture(scope="module")
def tree() -> Iterator[Tree]:
    yield read_tree(sources())
    _importing.cache_clear()


def test_the_real_tree_is_read(tree: Tree) -> None:
    assert {"daskserve.common.types", "daskserve.cluster.protocols.base"} <= set(tree)
    seen = {(each.importer, each.target) for each in imports(tree)}
    assert ("daskserve.cluster.protocols.base", "daskserve.common.types") in seen
    assert layer_of("daskserve.proxies.ingress.app") == "proxies"


def test_the_real_tree_breaks_no_rule(tree: Tree) -> None:
    for rule in RULES:
        assert rule(tree) == [], rule.__name__


def test_every_package_on_disk_is_listed_in_setup_py(tree: Tree) -> None:
    listed = re.search(r"packages=\[([^]]*)\]", (ROOT / "setup.py").read_text(encoding="utf-8"))
    assert listed is not None
    with_code = {name if module.is_package else name.rpartition(".")[0] for name, module in tree.items()}
    # Folders without modules, such as the pages, are listed, too, because setuptools omits folders that are
    # not.
    with_files = {"daskserve.pages", "daskserve.dashboards"}
    assert (with_code | with_files) - set(re.findall(r'"([^"]+)"', listed[1])) == set()


# ---- each rule can fail, and names the location

GOALS = "daskserve/control/decisions/goals.py"
ROUTING = "daskserve/data/caller/choice.py"
LAZY = "def start():\n    from daskserve.control import goals\n"
TYPES_ONLY = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "


@each_case(
    ("rule", "files", "place"),
    [
        (modules_without_a_layer, {"daskserve/extra/tools.py": ""}, "daskserve/extra/tools.py:1"),
        (modules_without_a_layer, {"daskserve/extra/__init__.py": ""}, "daskserve/extra/__init__.py:1"),
        (
            imports_to_the_right,
            {
                "daskserve/common/types.py": "import re\nimport daskserve.cluster.protocols.base",
                "daskserve/cluster/protocols/base.py": "",
            },
            "daskserve/common/types.py:2",
        ),
        (
            imports_to_the_right,
            {"daskserve/cluster/worker/host.py": LAZY, GOALS: ""},
            "daskserve/cluster/worker/host.py:2",
        ),
        (
            imports_to_the_right,
            {
                "daskserve/data/caller/routing/router.py": TYPES_ONLY
                + "from daskserve.proxies.ingress.app import App"
            },
            "daskserve/data/caller/routing/router.py:3",
        ),
        (
            imports_to_the_right,
            {"proxies/app.py": "from daskserve.client import client", "daskserve/client/client.py": ""},
            "proxies/app.py:1",
        ),
        (
            imports_to_the_right,
            {
                "proxies/ingress/app.py": "import importlib\n"
                "importlib.import_module('daskserve.client.functions.instances')"
            },
            "proxies/ingress/app.py:2",
        ),
        (
            imports_between_strangers,
            {
                "daskserve/control/reconcile.py": "from daskserve.data import routing",
                ROUTING: "",
            },
            "daskserve/control/reconcile.py:1",
        ),
        (
            imports_between_strangers,
            {
                "daskserve/data/caller/routing/router.py": "from ....control.decisions.goals import Goal",
                GOALS: "",
            },
            "daskserve/data/caller/routing/router.py:1",
        ),
        (
            imports_of_distributed,
            {"daskserve/client/client.py": "import distributed"},
            "daskserve/client/client.py:1",
        ),
        (
            imports_of_distributed,
            {"daskserve/client/functions/instances.py": "import dask\nfrom dask.distributed import Client"},
            "daskserve/client/functions/instances.py:2",
        ),
        (
            imports_of_distributed,
            {"proxies/ingress/app.py": "from dask import distributed"},
            "proxies/ingress/app.py:1",
        ),
        (
            imports_of_distributed,
            {"daskserve/common/types.py": TYPES_ONLY + "from distributed.comm import Comm"},
            "daskserve/common/types.py:3",
        ),
        (
            imports_of_the_facade,
            {"daskserve/client/functions/instances.py": "import daskserve as serve"},
            "daskserve/client/functions/instances.py:1",
        ),
        (
            imports_of_the_facade,
            {"proxies/ingress/app.py": "from daskserve import ServeError"},
            "proxies/ingress/app.py:1",
        ),
        (
            imports_of_the_facade,
            {"daskserve/client/client.py": "from .. import run"},
            "daskserve/client/client.py:1",
        ),
        (
            imports_past_the_seam,
            {
                "daskserve/data/caller/routing/router.py": "import daskserve.cluster.protocols.base",
                "daskserve/data/caller/calls/handle.py": TYPES_ONLY
                + "from daskserve.cluster.dask.connection import DaskConnection",
            },
            "daskserve/data/caller/calls/handle.py:3",
        ),
        (
            imports_past_the_seam,
            {
                "proxies/ingress/app.py": "import re\nfrom daskserve.cluster import dask",
                "daskserve/cluster/dask/cluster.py": "",
            },
            "proxies/ingress/app.py:2",
        ),
        (
            import_cycles,
            {
                "daskserve/common/types.py": "from daskserve.errors import A",
                "daskserve/errors.py": TYPES_ONLY + "from daskserve.common.types import B",
            },
            "daskserve/common/types.py:1",
        ),
        (
            import_cycles,
            {
                "daskserve/common/types.py": "from daskserve.errors import A",
                "daskserve/errors.py": "import re\ndef f():\n    from .common import clock",
                "daskserve/common/clock.py": "import daskserve.common.types",
            },
            "daskserve/common/clock.py:1",
        ),
    ],
)
def test_each_rule_finds_its_violation(
    rule: Callable[[Tree], list[str]], files: dict[str, str], place: str
) -> None:
    found = rule(read_tree(files))
    assert len(found) == 1
    assert found[0].startswith(f"{place}: ")


def test_a_valid_tree_breaks_no_rule() -> None:
    tree = read_tree(
        {
            "daskserve/__init__.py": "from daskserve.client.client import Client",
            "daskserve/common/types.py": "import re",
            "daskserve/errors.py": "import dask.config\n"
            + TYPES_ONLY
            + "from daskserve.common.types import GoalId",
            "daskserve/cluster/__init__.py": "",
            "daskserve/cluster/worker/host.py": "import distributed\nfrom ...common import types",
            "daskserve/cluster/protocols/base.py": "from ...common.types import GoalId",
            "daskserve/control/decisions/goals.py": "from daskserve.cluster.protocols import base",
            "daskserve/data/caller/routing/router.py": "import daskserve.cluster.protocols.base",
            "proxies/ingress/app.py": "from daskserve.data.caller.routing.router import Router",
            "daskserve/client/client.py": "import daskserve.actors",
            "daskserve/actors.py": "from daskserve.proxies.ingress.app import App\nfrom .common import types",
        }
    )
    assert [line for rule in RULES for line in rule(tree)] == []
