"""Project rules that standard linters do not check: size budgets, protocols, time and chance, module state.

As in test_layers.py, each check is a function from parsed sources to ``file:line: what is wrong``, tested on
the real tree and on an invalid file. The exceptions at the top are listed by name, with the reason.
"""

from __future__ import annotations

import ast
import copyreg
import functools
import inspect
import pickle
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from daskserve import errors

ROOT = Path(__file__).parent.parent
FOLDERS = ("daskserve", "proxies", "examples", "benchmarks")

FILE_LINES = 500
CLASS_METHODS = 25  # inherited ones included, but for those of other libraries' classes and of protocols
CLASS_ATTRIBUTES = 20
FUNCTION_LINES = 60  # lines of code; docstrings do not count

#: ``"daskserve/x.py:Name": "why it may be larger"``
SIZE_EXCEPTIONS: Mapping[str, str] = {
    "daskserve/client/client.py:ClientVerbs": "its methods are the verbs, a mixin for each noun",
    "daskserve/client/client.py:AsyncClient": "its methods are the verbs, a mixin for each noun",
    "daskserve/data/caller/calls/handle.py:Handle": "it has the attributes that Ray Serve's handles have",
    "daskserve/data/caller/calls/handle.py:StreamHandle": "it is a `Handle`",
    "daskserve/data/caller/calls/async_handle.py:AsyncHandle": "it is a `Handle`",
    "daskserve/data/replica/user_code/servable.py:Servable": "each step runs in a thread or on a loop",
}
#: ``"Name": "why only its own module names this protocol, or has a single class of this repository"``
PROTOCOL_EXCEPTIONS: Mapping[str, str] = {
    "MayLeaveAnswer": "its class is in a layer above, and a function would cost each request",
    "RunningThread": "threading.Thread is the second one",
}
#: ``"daskserve/x.py:NAME": "why this module-level object may change"``
STATE_EXCEPTIONS: Mapping[str, str] = {
    "daskserve/telemetry/collector.py:PROCESS": "it is part of Prometheus' registry, which is per process",
    "daskserve/telemetry/profiling/memory.py:_TRACING": "tracemalloc is one per process",
    "daskserve/common/types.py:DONE": "it is an empty tuple of an awaitable class",
}

#: The modules that may use private names of other libraries.
INTERNALS = (
    "daskserve/internals/",
    "daskserve/cluster/distributed_internals.py",
    "daskserve/cluster/dask/tasks.py",
    "daskserve/cluster/reserved_resources.py",
    "daskserve/cluster/worker/request_tasks.py",
    "daskserve/cluster/scheduler/http/panels/dashboard_internals.py",
)
#: The modules of libraries whose other modules are not documented.
DOCUMENTED_MODULES: Mapping[str, frozenset[str]] = {
    "distributed": frozenset({"distributed", "distributed.comm", "distributed.deploy"}),
}
#: ``"daskserve/x.py:_name": "why this file may use that private name of another library"``
PRIVATE_EXCEPTIONS: Mapping[str, str] = {
    "daskserve/cluster/store/folders.py:_pipe_file": "fsspec documents it for its asynchronous file systems",
    "daskserve/cluster/worker/child_main.py:_exit": "os._exit is documented",
    "daskserve/loops/event_loop.py:_get_running_loop": "asyncio.events.__all__ has it",
    "daskserve/loops/forks.py:_exit": "os._exit is documented",
    "benchmarks/bench_faults.py:_exit": "os._exit is documented",
    "daskserve/control/scaling/importing.py:_current_frames": "sys._current_frames is documented",
    "daskserve/data/replica/execution/loop_watch.py:_current_frames": "sys._current_frames is documented",
    "daskserve/telemetry/profiling/threads.py:_current_frames": "sys._current_frames is documented",
}

#: Names of the standard library, and the files that may use them: for time and chance, take a Clock or an rng
#: as an argument; for the environment, add a setting; for modules, copy the dictionary.
BANNED: Mapping[str, tuple[str, ...]] = {
    r"time\.(time|monotonic|perf_counter)(_ns)?|time\.sleep|asyncio\.sleep|random\..+"
    r"|datetime\..*(now|utcnow|today)": (
        "daskserve/common/clock.py",
        "daskserve/cluster/",
        "daskserve/testing.py",
        "examples/",
        "benchmarks/",
    ),
    r"os\.(environb?|getenv|putenv)": ("daskserve/common/settings.py", "examples/", "benchmarks/"),
    # Other threads may import modules meanwhile; `copy` is one step.
    r"sys\.modules\.(items|keys|values)": (),
}

Tree = Mapping[str, str]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def read_sources() -> dict[str, str]:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


#: The files are parsed once for all rules; the fixture `tree` forgets them.
parsed_once = functools.cache(ast.parse)


@functools.cache
def walked(parsed: ast.Module) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(parsed))


def _nodes(tree: Tree) -> Iterator[tuple[str, ast.AST]]:
    for path, source in tree.items():
        for node in walked(parsed_once(source)):
            yield path, node


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, Function)


# ---- size


def oversized(tree: Tree) -> list[str]:
    return [
        f"{path}:{line}: {name} has {what}"
        for path, line, name, what in _over_budget(tree)
        if f"{path}:{name}" not in SIZE_EXCEPTIONS
    ]


def _over_budget(tree: Tree) -> Iterator[tuple[str, int, str, str]]:
    for path, source in tree.items():
        lines = len(source.splitlines())
        if lines > FILE_LINES:
            yield path, 1, path.rpartition("/")[2], f"{lines} lines, more than {FILE_LINES}"
    classes = Classes(tree)
    for (path, name), node in classes.nodes.items():
        methods = len(classes.methods((path, name)))
        if methods > CLASS_METHODS:
            yield path, node.lineno, name, f"{methods} methods, more than {CLASS_METHODS}"
    for path, node in _nodes(tree):
        if isinstance(node, ast.ClassDef):
            attributes = len(_own_attributes(node))
            if attributes > CLASS_ATTRIBUTES:
                yield path, node.lineno, node.name, f"{attributes} attributes, more than {CLASS_ATTRIBUTES}"
        if isinstance(node, Function):
            lines = _code_lines(node)
            if lines > FUNCTION_LINES:
                yield path, node.lineno, node.name, f"{lines} lines, more than {FUNCTION_LINES}"


class Classes:
    """The classes of a tree, by file and name, with bases that are found by their imports."""

    def __init__(self, tree: Tree) -> None:
        parsed = {path: parsed_once(source) for path, source in tree.items()}
        self.nodes = {
            (path, node.name): node
            for path, module in parsed.items()
            for node in walked(module)
            if isinstance(node, ast.ClassDef)
        }
        self._imported = {path: _imported_names(module) for path, module in parsed.items()}
        self._paths = {_module_of(path): path for path in tree}

    def methods(self, key: tuple[str, str]) -> set[str]:
        """Return the names of a class's methods, inherited ones included."""
        found = {child.name for child in self.nodes[key].body if isinstance(child, Function)}
        for base in self.nodes[key].bases:
            parent = self._find(key[0], base.value if isinstance(base, ast.Subscript) else base)
            if parent in self.nodes and not _is_protocol(self.nodes[parent]):
                found |= self.methods(parent)
        return found

    def members(self, key: tuple[str, str]) -> set[str]:
        """Return the names of a class's methods and attributes, inherited ones included, special ones not."""
        node = self.nodes[key]
        found = {child.name for child in node.body if isinstance(child, Function)} | _own_attributes(node)
        for child in node.body:
            targets = child.targets if isinstance(child, ast.Assign) else [getattr(child, "target", None)]
            names = (each for target in targets if target is not None for each in ast.walk(target))
            found |= {each.id for each in names if isinstance(each, ast.Name)}
        for base in node.bases:
            parent = self._find(key[0], base.value if isinstance(base, ast.Subscript) else base)
            if parent in self.nodes:
                found |= self.members(parent)
        return {each for each in found if not each.startswith("__")}

    def _find(self, path: str, base: ast.expr) -> tuple[str, str]:
        if isinstance(base, ast.Name) and (path, base.id) in self.nodes:
            return path, base.id
        module, _, name = _dotted(base, self._imported[path]).rpartition(".")
        return self._paths.get(module, ""), name


def _module_of(path: str) -> str:
    dotted = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"daskserve.{dotted}" if dotted.startswith("proxies") else dotted


def _is_protocol(node: ast.ClassDef) -> bool:
    bases = {ast.unparse(base).partition("[")[0] for base in node.bases}
    return not bases.isdisjoint({"Protocol", "typing.Protocol"})


def _own_attributes(node: ast.ClassDef) -> set[str]:
    return {
        child.attr
        for child in ast.walk(node)
        if isinstance(child, ast.Attribute)
        and isinstance(child.ctx, ast.Store)
        and isinstance(child.value, ast.Name)
        and child.value.id == "self"
    }


def _code_lines(node: Function) -> int:
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node) is not None:
        docstring = node.body[0]
        lines -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
    return lines


# ---- protocols


def lone_protocols(tree: Tree, implemented: Collection[str] = ()) -> list[str]:
    """Find protocols that only their own module uses, and that fewer than two classes there implement.

    ``implemented`` has the names of those that classes of tests implement, by name.
    """
    protocols = {
        node.name: (path, node.lineno)
        for path, node in _nodes(tree)
        if isinstance(node, ast.ClassDef) and _is_protocol(node)
    }
    elsewhere, subclasses = set(implemented), Counter[str]()
    for path, node in _nodes(tree):
        if isinstance(node, (ast.Name, ast.Attribute, ast.alias)):
            name = next(getattr(node, each) for each in ("id", "attr", "name") if hasattr(node, each))
            if name in protocols and protocols[name][0] != path:
                elsewhere.add(name)
        elif isinstance(node, ast.ClassDef):
            subclasses.update(base.id for base in node.bases if isinstance(base, ast.Name))
    return [
        f"{path}:{line}: no other module names {name}; name the class that it stands for, or pass a function"
        for name, (path, line) in protocols.items()
        if name not in elsewhere and subclasses[name] < 2 and name not in PROTOCOL_EXCEPTIONS
    ]


def protocols_of_one(tree: Tree, tests: Tree) -> list[str]:
    """Find protocols of a tree whose members fewer than two classes have, including classes of tests."""
    classes = Classes({**tree, **tests})
    members = {key: classes.members(key) for key in classes.nodes}
    protocols = {key for key, node in classes.nodes.items() if _is_protocol(node)}
    found = []
    for path, name in sorted(protocols & {key for key in members if key[0] in tree}):
        wanted = members[path, name]
        count = sum(wanted <= had for key, had in members.items() if key not in protocols)
        if count < 2 and name not in PROTOCOL_EXCEPTIONS:
            line = classes.nodes[path, name].lineno
            found.append(
                f"{path}:{line}: {count} classes implement {name}; name the class, or pass functions"
            )
    return found


def read_tests() -> dict[str, str]:
    paths = sorted((ROOT / "tests").rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def implemented_in_tests() -> set[str]:
    """Return the names of the base classes of classes in tests."""
    texts = (path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    bases = (found for text in texts for found in re.findall(r"^\s*class \w+\(([^)]*)\):", text, re.M))
    return {base.strip() for each in bases for base in each.split(",")}


# ---- time, chance and the environment


def banned_names(tree: Tree) -> list[str]:
    """Find banned names that are called or passed on."""
    found = []
    for path, source in tree.items():
        parsed = parsed_once(source)
        names = _imported_names(parsed)
        annotations = _annotation_nodes(parsed)
        for node in walked(parsed):
            if isinstance(node, ast.Name | ast.Attribute) and id(node) not in annotations:
                dotted = _dotted(node, names)
                found += [
                    f"{path}:{node.lineno}: {dotted}; take it as an argument, or from common/settings.py"
                    for banned, allowed in BANNED.items()
                    if re.fullmatch(banned, dotted) and not path.startswith(allowed)
                ]
    return found


def _imported_names(parsed: ast.Module) -> dict[str, str]:
    """Return ``{local name: dotted name}`` of everything a file imports."""
    names = {}
    for node in walked(parsed):
        if isinstance(node, ast.Import):
            names.update({alias.asname: alias.name for alias in node.names if alias.asname})
            names.update({root: root for root in (a.name.split(".")[0] for a in node.names if not a.asname)})
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
    return names


def _annotation_nodes(parsed: ast.Module) -> set[int]:
    """Return the ids of annotation nodes: ``rng: random.Random`` names a type and draws nothing."""
    roots = []
    for node in walked(parsed):
        roots += [getattr(node, "annotation", None), getattr(node, "returns", None)]
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "cast"):
            roots += node.args
    return {id(part) for root in roots if isinstance(root, ast.AST) for part in ast.walk(root)}


def _dotted(node: ast.expr, names: Mapping[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value, names)
        return f"{base}.{node.attr}" if base else ""
    return names.get(node.id, "") if isinstance(node, ast.Name) else ""


# ---- module state

MUTABLE_DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)
READ_ONLY_TYPES = frozenset({"Mapping", "Sequence", "Set", "Collection", "Iterable", "tuple", "frozenset"})
#: Calls with immutable results, or with results that are meant to be shared.
CONSTANT_MAKERS = frozenset(
    "bool bytes float frozenset int object str tuple range slice getLogger TypeVar ParamSpec TypeVarTuple "
    "NewType ContextVar MappingProxyType namedtuple compile Struct Path PurePosixPath version encode "
    "timedelta Decimal ConfigDict JSONEncoder JSONDecoder "
    "blocking awaitable both_forms "  # the two forms of a function
    "option options".split()  # decorators of commands
)


def module_state(tree: Tree) -> list[str]:
    """Find module-level names that hold, or may later hold, mutable state."""
    frozen = _frozen_classes(tree)
    found = []
    for path, source in tree.items():
        parsed = parsed_once(source)
        for node in _module_level(parsed.body):
            found += _state_of(path, node, frozen)
        for node in walked(parsed):
            if isinstance(node, ast.Global):
                found.append(f"{path}:{node.lineno}: global {', '.join(node.names)}")
    return found


def _module_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
            parts = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
            parts += [handler.body for handler in getattr(node, "handlers", [])]
            for part in parts:
                yield from _module_level(part)


def _state_of(path: str, node: ast.stmt, frozen: frozenset[str]) -> list[str]:
    if isinstance(node, ast.Assign):
        targets, annotation = node.targets, None
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        targets, annotation = [node.target], node.annotation
    elif isinstance(node, ast.AugAssign):
        targets, annotation = [node.target], None
    else:
        return []
    name = ast.unparse(targets[0])
    problem = _problem_with(name, annotation, node.value, frozen)
    if problem is None or f"{path}:{name}" in STATE_EXCEPTIONS:
        return []
    return [f"{path}:{node.lineno}: {name} {problem}"]


def _problem_with(
    name: str, annotation: ast.expr | None, value: ast.expr | None, frozen: frozenset[str]
) -> str | None:
    if name.startswith("__") and name.endswith("__"):
        return None  # names such as __all__ belong to the language
    declared = ast.unparse(annotation).partition("[")[0].rpartition(".")[2] if annotation is not None else ""
    if isinstance(value, MUTABLE_DISPLAYS):
        if name.lstrip("_").isupper() and declared in READ_ONLY_TYPES:
            return None
        return "is mutable: write it in UPPER_CASE and annotate it as Mapping, Sequence, tuple or frozenset"
    if isinstance(value, ast.Call):
        maker = ast.unparse(value.func).rpartition(".")[2]
        if maker not in CONSTANT_MAKERS | frozen:
            return f"holds the result of {maker}(), which may be mutable; create it where it is used"
    return None


def _frozen_classes(tree: Tree) -> frozenset[str]:
    frozen = set()
    for _, node in _nodes(tree):
        if isinstance(node, ast.ClassDef):
            decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
            bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
            if any("frozen=True" in text for text in decorators) or bases & {"NamedTuple", "StrEnum", "Enum"}:
                frozen.add(node.name)
    return frozenset(frozen)


# ---- other libraries

BY_NAME = frozenset({"getattr", "hasattr", "setattr", "delattr"})


def foreign_private_names(tree: Tree) -> list[str]:
    """Find private names that the tree does not define, so that they belong to another library."""
    rest = {path: source for path, source in tree.items() if not path.startswith(INTERNALS)}
    own = {Path(path).stem for path in tree}
    own.update(name for _, node in _nodes(rest) for name in _defined_names(node))
    return [
        f"{path}:{node.lineno}: {name} is private to another library; reach it through daskserve/internals"
        for path, node in _nodes(rest)
        for name in _used_names(node)
        if name.startswith("_") and not name.endswith("_") and name not in own
        if f"{path}:{name}" not in PRIVATE_EXCEPTIONS
    ]


def undocumented_modules(tree: Tree) -> list[str]:
    """Find imports of modules that a library does not document."""
    found = []
    for path, node in _nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and not path.startswith(INTERNALS):
            names = (
                [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            )
            for name in names:
                if name not in DOCUMENTED_MODULES.get(name.partition(".")[0], {name}):
                    found.append(f"{path}:{node.lineno}: {name} is not documented; see daskserve/internals")
    return found


def _defined_names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ClassDef | Function):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
        yield node.attr


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _used_names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node reads from an object or a module, as far as the syntax shows them."""
    if isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.ImportFrom):
        yield from (alias.name for alias in node.names)
        yield from (node.module or "").split(".")
    elif isinstance(node, ast.Import):
        yield from (part for alias in node.names for part in alias.name.split("."))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME:
        yield from (str(each.value) for each in node.args[1:2] if isinstance(each, ast.Constant))


#: A reference in a comment, a docstring or a string to an object of the library.
REFERENCE = re.compile(r"(?<!`)`(daskserve(?:\.\w+)+)`(?!`)")


def stale_references(tree: Tree) -> list[str]:
    """Find references to names that do not exist in a module or package of the library.

    Other references are ignored, because settings and loggers have names that begin with ``daskserve``, too.
    """
    names = {_module_of(path): _names_in(parsed_once(source)) for path, source in tree.items()}
    packages = {each.rpartition(".")[0] for each in names}
    found = []
    for path, source in tree.items():
        for number, line in enumerate(source.splitlines(), 1):
            for reference in REFERENCE.findall(line):
                first, *rest = reference.split(".")
                module = first
                while rest and (f"{module}.{rest[0]}" in names or f"{module}.{rest[0]}" in packages):
                    module = f"{module}.{rest.pop(0)}"
                if module != first and rest and rest[0] not in names.get(module, ()):
                    found.append(f"{path}:{number}: {reference} does not exist")
    return found


def _names_in(parsed: ast.Module) -> set[str]:
    imported = (node.names for node in walked(parsed) if isinstance(node, ast.Import | ast.ImportFrom))
    names = {each.asname or each.name for group in imported for each in group}
    return names.union(*(_defined_names(node) for node in walked(parsed)))


# ---- the real tree


@pytest.fixture(scope="module")
def tree() -> Iterator[Tree]:
    yield read_sources()
    walked.cache_clear()
    parsed_once.cache_clear()


def _library(tree: Tree) -> Tree:
    return {path: text for path, text in tree.items() if path.startswith(("daskserve/", "proxies/"))}


def test_the_real_tree_breaks_no_rule(tree: Tree) -> None:
    library = _library(tree)
    assert oversized(tree) == []
    assert lone_protocols(library, implemented_in_tests()) == []
    assert protocols_of_one(library, read_tests()) == []
    assert banned_names(tree) == []
    assert module_state(library) == []
    assert foreign_private_names(tree) + undocumented_modules(library) == []
    assert stale_references(library) == []


def test_inherited_methods_count_toward_the_budget() -> None:
    half = "".join(f"    def {{letter}}{i}(self): ...\n" for i in range(CLASS_METHODS))
    base = "class Base:\n" + half.replace("{letter}", "a")
    library = "import other, typing\nclass Promise(typing.Protocol):\n" + half.replace("{letter}", "c")
    child = "    def a1(self): ...\n    def b(self): ...\n"
    tree = {
        "daskserve/base.py": base,
        "proxies/promise.py": library,
        "daskserve/child.py": f"from daskserve.base import Base\nclass Child(Base):\n{child}",
        "daskserve/far.py": f"from daskserve import base\nclass Far(base.Base[int]):\n{child}",
        "daskserve/kept.py": "from daskserve.proxies.promise import Promise\nimport other\n"
        f"class Kept(Promise, other.Base):\n{child}",
    }
    assert [each.partition(": ")[2] for each in oversized(tree)] == [
        "Child has 26 methods, more than 25",
        "Far has 26 methods, more than 25",
    ]


def test_a_protocol_has_two_classes() -> None:
    promise = "class A(Protocol):\n    size: int\n    def f(self) -> None: ..."
    one = "class B:\n    def f(self) -> None:\n        self.size = 1"
    half = "class C:\n    def f(self) -> None: ..."
    tests = {"tests/c.py": half}
    (found,) = protocols_of_one({"daskserve/a.py": promise, "daskserve/b.py": one}, tests)
    assert found.startswith("daskserve/a.py:1: 1 classes implement A")
    tests = {"tests/c.py": f"{half}\n    size = 2"}
    assert protocols_of_one({"daskserve/a.py": promise, "daskserve/b.py": one}, tests) == []


# ---- each rule can fail, and names the location

LONG = "def f():\n" + "    pass\n" * FUNCTION_LINES
MANY = "class A:\n" + "".join(f"    def m{i}(self): ...\n" for i in range(CLASS_METHODS + 1))
WIDE = "class A:\n    def m(self):\n" + "".join(
    f"        self.x{i} = 1\n" for i in range(CLASS_ATTRIBUTES + 1)
)


VIOLATIONS: Sequence[tuple[Callable[[Tree], list[str]], str, int]] = [
    (oversized, "\n" * (FILE_LINES + 1), 1),
    (oversized, "\n" + LONG, 2),
    (oversized, MANY, 1),
    (oversized, WIDE, 1),
    (lone_protocols, "import typing\nclass A(typing.Protocol): ...\ndef f(a: A): ...", 2),
    (lone_protocols, "class A(Protocol): ...\nclass B(A): ...", 1),
    (stale_references, "x = 1\n#: See `daskserve.made_up.y`.", 2),
    (banned_names, "import time\nnow = time.monotonic()", 2),
    (banned_names, "import time as t\ndef f(clock=t.perf_counter): ...", 2),
    (banned_names, "from time import time\ndef f():\n    return time()", 3),
    (banned_names, "import asyncio\nasync def f():\n    await asyncio.sleep(1)", 3),
    (banned_names, "import random\ndef f():\n    return random.Random(1)", 3),
    (banned_names, "from random import choice\ndef f():\n    return choice([1])", 3),
    (banned_names, "import datetime\nx = datetime.datetime.now", 2),
    (banned_names, "import os\nx = os.environ['A']", 2),
    (banned_names, "import sys\nx = sorted(sys.modules.items())", 2),
    (banned_names, "from os import getenv\nx = 1\ny = getenv('A')", 3),
    (module_state, "x: int = 1\ncache = {}", 2),
    (module_state, "CACHE: dict[str, int] = {}", 1),
    (module_state, "CACHE = []", 1),
    (module_state, "cache: Mapping[str, int] = {}", 1),
    (module_state, "import threading\nLOCK = threading.Lock()", 2),
    (module_state, "try:\n    X = set_up()\nexcept ValueError:\n    X = None", 2),
    (module_state, "X = None\ndef f():\n    global X\n    X = 1", 3),
    (foreign_private_names, "import lib\nx = lib._hidden", 2),
    (foreign_private_names, "def f(client):\n    client._hidden = 1", 2),
    (foreign_private_names, "def f(client):\n    return getattr(client, '_hidden', None)", 2),
    (foreign_private_names, "from lib import _hidden", 1),
    (foreign_private_names, "from lib._hidden import x", 1),
    (foreign_private_names, "import lib._hidden", 1),
    (undocumented_modules, "from distributed import Client\nimport distributed.utils", 2),
    (undocumented_modules, "from distributed.comm import connect\nfrom distributed.core import Status", 2),
]


def test_each_rule_finds_its_violation() -> None:
    for rule, source, line in VIOLATIONS:
        (found,) = rule({"daskserve/made_up.py": source})
        assert found.startswith(f"daskserve/made_up.py:{line}: "), source


ORDERLY = '''
import logging, random, time
from collections.abc import Mapping

__all__ = ["f"]
logger = logging.getLogger("daskserve.made_up")
NAMES: Mapping[str, str] = {"a": "b"}
PAIR = ("a", 1)

@dataclass(frozen=True)
class Load:
    """Requests of a replica."""

IDLE = Load()

def f(rng: random.Random, clock: Clock, at: time.struct_time) -> random.Random:
    """Return the generator that was passed in."""
    cache = {}
    cache[rng.random()] = clock.now()
    try:
        return rng
    except ValueError:
        raise

def _g(): ...

class Handle:
    """A handle."""

    _count: int

    def __init__(self, other: Handle) -> None:
        self._router = other._router
        _g.__name__, other._count
'''


def test_a_valid_file_breaks_no_rule() -> None:
    tree = {"daskserve/made_up.py": ORDERLY}
    assert [line for rule, _, _ in VIOLATIONS for line in rule(tree)] == []


def test_every_exception_to_a_rule_is_still_needed(tree: Tree) -> None:
    for name in (*STATE_EXCEPTIONS, *PRIVATE_EXCEPTIONS):
        path, _, what = name.partition(":")
        assert path in tree, f"{path} does not exist"
        assert what in tree[path], f"{name} is gone"
    large = {path: tree[path] for path in tree if path.startswith("daskserve/")}
    assert SIZE_EXCEPTIONS.keys() - {f"{path}:{name}" for path, _, name, _ in _over_budget(large)} == set()


# ---- errors cross processes

SAMPLES: Mapping[str, Any] = {
    "int": 7,
    "float": 2.5,
    "str": "some text",
    "bool": None,
    "tuple": ("a", 1),
    "NoneType": "some",
}


def _keyword_fields(error_class: type[BaseException]) -> dict[str, Any]:
    """Return a non-default value for every keyword field of an error class."""
    parameters = inspect.signature(error_class).parameters.values()
    fields = {}
    for each in parameters:
        if each.kind is inspect.Parameter.KEYWORD_ONLY:
            type_name = type(each.default).__name__
            fields[each.name] = not each.default if type_name == "bool" else SAMPLES[type_name]
    return fields


def assert_survives_pickling(error: BaseException) -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        for dumps in (pickle.dumps, cloudpickle.dumps):
            copy = pickle.loads(dumps(error, protocol=protocol))
            assert type(copy) is type(error)
            expected = (error.args, str(error), vars(error))
            assert (copy.args, str(copy), vars(copy)) == expected, type(error)


#: Other test modules may define subclasses.
ERROR_CLASSES = [
    *(each for each in errors.subclasses() if each.__module__.startswith("daskserve.")),
    errors.RemoteTraceback,
]


def test_every_error_round_trips_through_pickle() -> None:
    for error_class in ERROR_CLASSES:
        assert_survives_pickling(error_class())
        assert_survives_pickling(error_class("what went wrong"))
        assert_survives_pickling(error_class("what went wrong", **_keyword_fields(error_class)))


def test_the_error_classes_and_their_fields_are_found() -> None:
    assert {errors.ReplicaBusyError, errors.PortInUseError} <= set(ERROR_CLASSES)
    assert _keyword_fields(errors.ActorLostError) == {
        "begun": False,
        "is_disconnected": True,
        "is_planned": True,
    }


class NotPicklable(Exception):
    """Takes a keyword argument that is not in its args: an error that does not survive pickling."""

    def __init__(self, *, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


def test_the_pickle_check_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    # Importing distributed registers all existing error classes with tblib, which then pickles them.
    monkeypatch.delitem(copyreg.dispatch_table, NotPicklable, raising=False)
    with pytest.raises(TypeError):
        assert_survives_pickling(NotPicklable(status=1))
