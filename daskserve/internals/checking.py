"""Checks that an installed library has the internals that daskserve uses.

A module of internals imports and checks everything within one `needs`::

    with needs("tornado", ">=6.6,<6.7") as check:
        from tornado.http1connection import HTTP1Connection

        check.attributes(HTTP1Connection, "_parse_headers")

Missing parts raise one `LibraryVersionError` that names the library, its version and the versions to install.
"""

from __future__ import annotations

import inspect
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from daskserve.errors import LibraryVersionError

PYTHON = "python"


class Check:
    """Collects the missing parts of a library, so that one error names them all."""

    def __init__(self) -> None:
        self.missing: list[str] = []

    def attributes(self, owner: Any, *names: str) -> None:
        """Require that a module or class has these attributes."""
        self.missing += [f"{_name_of(owner)}.{name}" for name in names if not hasattr(owner, name)]

    def fields(self, owner: type[Any], *names: str) -> None:
        """Require that the constructor of a class, or of one of its bases, sets these attributes."""
        constructors = [vars(base).get("__init__") for base in owner.__mro__]
        known = {
            name
            for each in constructors
            if inspect.isfunction(each)
            for name in (*each.__code__.co_names, *each.__code__.co_varnames)
        }
        self.missing += [f"{_name_of(owner)}().{name}" for name in names if name not in known]

    def constants(self, function: Callable[..., Any], *values: object) -> None:
        """Require that the code of a function mentions these constants."""
        known = function.__code__.co_consts
        self.missing += [f"{_name_of(function)} with {value!r}" for value in values if value not in known]

    def parameters(self, function: Callable[..., Any], *names: str) -> None:
        """Require that a function takes exactly these parameters, in this order."""
        found = tuple(inspect.signature(function).parameters)
        if found != names:
            self.missing.append(f"{_name_of(function)}({', '.join(names)})")


@contextmanager
def needs(library: str, versions: str) -> Iterator[Check]:
    """Import and check the internals of a library in the body of a ``with`` statement.

    Parameters
    ----------
    library
        The name by which pip installs the library, or `PYTHON` for the standard library.
    versions
        The versions known to work, as pip takes them: ``">=6.6,<6.7"``.

    Raises
    ------
    LibraryVersionError
        The installed version lacks a module, a name or a parameter that is needed.
    ImportError
        The library, or something that the library itself needs, is not installed.
    """
    check = Check()
    try:
        yield check
    except ImportError as error:
        if not _is_moved(library, error):
            raise
        check.missing.append(error.msg)
        raise _error(library, versions, check.missing) from error
    if check.missing:
        raise _error(library, versions, check.missing)


def _is_moved(library: str, error: ImportError) -> bool:
    """Return whether an import failed inside a library that is installed."""
    root = library.replace("-", "_")
    name = error.name or ""
    if isinstance(error, ModuleNotFoundError):
        return name.startswith(f"{root}.")
    return library == PYTHON or name.partition(".")[0] == root


def _error(library: str, versions: str, missing: list[str]) -> LibraryVersionError:
    if library == PYTHON:
        installed = platform.python_version()
        remedy = f"Run a Python in that range ({PYTHON}{versions})."
    else:
        from importlib import metadata

        installed = metadata.version(library)
        remedy = f"Install a version in that range: pip install '{library}{versions}'."
    return LibraryVersionError(
        f"daskserve works with {library}{versions}, but {library} {installed} is installed, which lacks "
        f"{'; '.join(missing)}. {remedy}",
        library=library,
        installed=installed,
        versions=versions,
    )


def _name_of(owner: Any) -> str:
    if inspect.ismodule(owner):
        return owner.__name__
    module, name = getattr(owner, "__module__", ""), getattr(owner, "__qualname__", None)
    return f"{module}.{name}" if name else repr(owner)
