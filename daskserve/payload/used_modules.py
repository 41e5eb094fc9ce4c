"""The modules of a project that a module uses, according to its source.

Problem: a process that builds one application may have imported modules for others. If these modules counted,
the version of the application would depend on what its process had done before, and a change of another
application, or of a number of replicas, would restart it. Choice: only imports count, from the application's
module on, those within functions included, and import paths in strings. If a source cannot be read, or
imports modules by names that it computes, all modules count.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

#: Packages that may import modules whose names are not in the source.
IMPORTERS = frozenset({"django", "hydra", "importlib", "pkgutil", "pluggy", "runpy", "stevedore"})
#: Parts of these packages that import no such modules.
HARMLESS = ("importlib.metadata", "importlib.resources")
#: Functions that may import any module.
EVALUATORS = frozenset({"__import__", "eval", "exec"})
#: ``pkg.module``, ``pkg.module.Name`` or ``module:Name``.
_PATH = re.compile(r"[^\W\d]\w*(?:[.:][^\W\d]\w*)+")


def used_by(roots: Iterable[str], modules: Mapping[str, ModuleType]) -> dict[str, ModuleType]:
    """Return those of a project's modules that the given modules use, directly or indirectly, and the given
    modules."""
    used: dict[str, ModuleType] = {}
    names = list(roots)
    while names:
        name = names.pop()
        module = modules.get(name)
        if name in used or module is None:
            continue
        used[name] = module
        references = _references(module)
        if references is None:
            return dict(modules)
        # Python imports a module's packages before the module.
        for reference in (name, *references):
            names += _named(reference, modules)
    return dict(sorted(used.items()))


def _named(reference: str, modules: Mapping[str, ModuleType]) -> Iterator[str]:
    """Return the modules in a dotted name; for ``pkg.*`` all modules of the package."""
    if reference.endswith(".*"):
        yield from (name for name in modules if name.startswith(reference[:-1]))
    parts = reference.split(".")
    prefixes = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    yield from (name for name in prefixes if name in modules)


def _references(module: ModuleType) -> frozenset[str] | None:
    """Return the dotted names in a module's source that may be modules; None if they cannot be known."""
    file = getattr(module, "__file__", None)
    if not file or not str(file).endswith(".py"):
        return None
    try:
        with open(file, "rb") as source:
            return references_in(source.read(), getattr(module, "__package__", None) or "")
    except (OSError, SyntaxError, ValueError, ImportError):
        return None  # the file is in a ZIP file, was removed, or has changed since it was imported


@functools.lru_cache(maxsize=2048)
def references_in(source: bytes, package: str) -> frozenset[str] | None:
    """Return the dotted names in a source that may be modules; None if it may import any module."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = importlib.util.resolve_name("." * node.level + base, package)
            found |= {f"{base}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if len(node.value) < 256 and _PATH.fullmatch(node.value):
                found.add(node.value.replace(":", "."))
        elif isinstance(node, ast.Name) and node.id in EVALUATORS:
            return None
    if any(each.partition(".")[0] in IMPORTERS and not each.startswith(HARMLESS) for each in found):
        return None
    return frozenset(found)


def modules_named_in(value: Any) -> set[str]:
    """Return the modules that import paths within plain values may name."""
    if isinstance(value, str):
        return {value.partition(":")[0], value.rpartition(".")[0]} if _PATH.fullmatch(value) else set()
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, (list, tuple)):
        items = value
    return set().union(*map(modules_named_in, items))
