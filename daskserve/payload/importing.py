"""Imports objects by their paths: ``"pkg.mod.Name"`` or ``"pkg.mod:Name"``.

Problem: a Python process imports a module once, so a worker that has imported ``shop`` keeps serving its code
after the file has changed, and a deploy sees no difference between two equal paths. Choice: a deployed path
contains the digests of the user's modules, and a worker that has imported other versions imports the modules
again.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import logging
import operator
import os
import socket
import sys
import sysconfig
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from types import ModuleType
from typing import Any, ClassVar

from daskserve.common.types import split_import_path
from daskserve.errors import BadRequestError, CodeLoadError
from daskserve.payload.error_text import summary_of
from daskserve.payload.used_modules import used_by

logger = logging.getLogger("daskserve.replica")

#: The attribute of a module that holds the digest of its file when it was imported.
_DIGEST = "__daskserve_digest__"
#: The digests of files before they were imported, by real path, because a file may change while it is
#: imported.
digests_before: ContextVar[Mapping[str, str] | None] = ContextVar("daskserve_digests", default=None)
MODULE_REMEDY = "Install it on the workers, too, or put its folder on their PYTHONPATH."


class ImportPath(str):
    """An import path, with the digests of the modules that it uses, by name.

    Only modules in the folder of the path's first module are included. Installed packages are not, because
    they do not change while a worker runs.
    """

    modules: Mapping[str, str]
    #: Held while modules are imported again: replicas of one process may start at the same time.
    lock: ClassVar[threading.RLock] = threading.RLock()

    @classmethod
    def of(cls, path: str) -> ImportPath:
        """Return a path whose modules this process has imported, with their digests."""
        found = cls(path)
        root = split_import_path(path)[0]
        used = used_by([root], _modules_beside([root]))
        found.modules = {name: file_digest(module) for name, module in used.items()}
        return found


def _modules_beside(names: Iterable[str]) -> dict[str, ModuleType]:
    """Return the imported modules in the folders of some modules' packages, without installed ones."""
    folders = tuple(f"{each}{os.sep}" for each in set(map(folder_of, names)) if each is not None)
    # A copy, because other threads also import and forget modules.
    modules = sys.modules.copy() if folders else {}
    files = {each: getattr(module, "__file__", None) or "" for each, module in modules.items()}
    return {
        name: modules[name]
        for name, file in sorted(files.items())
        if name != "__main__" and file.startswith(folders) and not _is_installed(file)
    }


def folder_of(name: str) -> str | None:
    """Return the folder that contains a module's top-level package; None for installed modules."""
    first = name.partition(".")[0]
    module = sys.modules.get(first)
    try:
        found = getattr(module, "__spec__", None) if module is not None else importlib.util.find_spec(first)
    except ValueError:  # the module has no spec, like __main__
        found = None
    file = getattr(module, "__file__", None) or getattr(found, "origin", None)
    if file is None or not os.path.isabs(file):
        return None
    folder: str = os.path.dirname(os.path.abspath(file))
    is_package = bool(getattr(found, "submodule_search_locations", None)) or hasattr(module, "__path__")
    if is_package:
        folder = os.path.dirname(folder)
    if folder == _standard_library() or _is_installed(f"{folder}{os.sep}"):
        return None
    return folder


def have_changed(modules: Iterable[ModuleType]) -> bool:
    """Return whether the file of any of the modules may have changed since it was imported."""
    for module in modules:
        # Without a digest, the time of the module's import is unknown.
        before = module.__dict__.get(_DIGEST)
        try:
            if before is None or (before and before != digest_of_file(str(module.__file__))):
                return True
        except OSError:
            return True  # the file was removed
    return False


def modules_in(folders: Iterable[str]) -> dict[str, ModuleType]:
    """Return the imported modules whose files are in some folders, by name, without installed ones."""
    starts = tuple(os.path.join(each, "") for each in folders)
    real: tuple[str, ...] = ()
    stdlib = os.path.join(_standard_library(), "")
    found = {}
    for name, module in sys.modules.copy().items():
        file = getattr(module, "__dict__", {}).get("__file__")
        if not file or file.startswith(stdlib) or _is_installed(file):
            continue
        # daskserve itself may run from a clone of the repository
        if name == "__main__" or name.partition(".")[0] == "daskserve":
            continue
        if not file.startswith(starts):
            # It may be the same folder by another name. Only the file system has this information, and
            # reading it is slow.
            real = real or tuple(os.path.join(os.path.realpath(each), "") for each in starts)
            inside = os.path.realpath(file)
            if not inside.startswith(real) or _is_installed(inside):
                continue
        found[name] = module
    return dict(sorted(found.items()))


class ModuleScan:
    """Caches `modules_in`, which takes a millisecond, until modules are imported or forgotten."""

    def __init__(self) -> None:
        self._imported: list[ModuleType] = []
        self._found: dict[str, dict[str, ModuleType]] = {}

    def modules_in(self, folder: str) -> dict[str, ModuleType]:
        """Return the imported modules in some folders; see `modules_in`."""
        imported = list(sys.modules.copy().values())
        is_same = len(imported) == len(self._imported) and all(map(operator.is_, imported, self._imported))
        if not is_same:
            self._imported, self._found = imported, {}
        if folder not in self._found:
            self._found[folder] = modules_in([folder])
        return self._found[folder]


def _is_installed(path: str) -> bool:
    return "site-packages" in path or "dist-packages" in path


@functools.cache
def _standard_library() -> str:
    return sysconfig.get_path("stdlib")


def file_digest(module: ModuleType) -> str:
    """Return the digest of a module's file, from `digests_before` or from the first call for this module."""
    found: str | None = module.__dict__.get(_DIGEST)
    if found is None:
        path = str(module.__file__)
        before = digests_before.get()
        found = before.get(os.path.realpath(path)) if before else None
        if found is None:
            try:
                found = digest_of_file(path)
            except OSError:  # the file is in a ZIP file, or was removed
                found = ""
        setattr(module, _DIGEST, found)
    return found


def digest_of_file(name: str) -> str:
    """Return the digest of a file; raise `OSError` if it cannot be read."""
    with open(name, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


class ModuleVersions:
    """The digests of the modules that pickled code refers to, stored before that code.

    Unpickling this object forgets other imported versions of these modules, so that unpickling the code
    imports the right ones.
    """

    def __init__(self, modules: Mapping[str, str]) -> None:
        self.modules = dict(sorted(modules.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return _met, (self.modules,)

    def check(self, *, is_exact: bool) -> None:
        """Check which versions were imported when the code was unpickled; see `import_definition`."""
        _check_versions("The code", self.modules, is_exact=is_exact)


def _met(modules: Mapping[str, str]) -> ModuleVersions:
    with ImportPath.lock:
        forget_others(modules)
    return ModuleVersions(modules)


def forget_others(modules: Mapping[str, str]) -> None:
    """Forget a project if this process has imported other versions of some modules, given with their digests.

    Modules that use them are forgotten, too. Otherwise, they would keep the old versions.
    """
    known = {name: sys.modules[name].__dict__.get(_DIGEST) for name in modules if name in sys.modules}
    if any(digest != modules[name] for name, digest in known.items()):
        forget({*modules, *_modules_beside(known)})


def forget(names: Iterable[str]) -> dict[str, ModuleType]:
    """Forget modules, so that they are imported again from their sources; return those that were imported."""
    gone = {name: sys.modules.pop(name) for name in list(names) if name in sys.modules}
    for module in gone.values():
        # Python treats bytecode as current if size and mtime in seconds match the source, which may have
        # changed twice in a second.
        cached = getattr(module, "__cached__", None)
        if cached:
            with suppress(OSError):
                os.unlink(cached)
    importlib.invalidate_caches()
    return gone


def import_definition(path: str, *, is_exact: bool = False) -> Any:
    """Import and return the object that ``"pkg.mod.Name"`` or ``"pkg.mod:Name"`` names.

    The modules of an `ImportPath` are imported again if this process has imported other versions of them.
    Existing objects continue to refer to the old modules.

    Parameters
    ----------
    is_exact : bool
        Whether files that differ from those of an `ImportPath` are an error; else a warning is logged.

    Raises
    ------
    CodeLoadError
        A file differs, and must not.
    BadRequestError
        The path has another form, there is no such module, or the module has no such name. Errors raised
        by the module itself, such as a missing import, are not changed.
    """
    if not isinstance(path, ImportPath):
        return _imported(path)
    with path.lock:
        forget_others(path.modules)
        found = _imported(path)
        _check_versions(path, path.modules, is_exact=is_exact)
    return found


def _check_versions(what: str, wanted: Mapping[str, str], *, is_exact: bool) -> None:
    """Log a warning if imported modules have other versions; with ``is_exact``, raise `CodeLoadError`."""
    modules = sys.modules.copy()
    found = {name: file_digest(modules[name]) for name in wanted if name in modules}
    others = sorted(name for name, digest in wanted.items() if found.get(name, digest) != digest)
    if others and is_exact:
        raise CodeLoadError(
            f"{what}: the file of module {', '.join(others)} on {socket.gethostname()} differs from that of "
            "the revision to roll back to. Install the files of that revision on the workers, or deploy it "
            "from its source; with env={'working_dir': '.'}, files are kept with each revision."
        )
    if others:
        logger.warning(
            "%s: the file of module %s differs from that of the program that deployed it. Install the same "
            "files on all machines, for example by env={'working_dir': '.'}.",
            what,
            ", ".join(others),
        )


def _imported(path: str) -> Any:
    module_name, name = split_import_path(path)
    if not module_name:
        raise BadRequestError(f"Import path {path!r} must have the form 'pkg.mod.Name' or 'pkg.mod:Name'.")
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(f"{missing}."):
            raise
        raise BadRequestError(
            f"Import path {path!r}: there is no module {missing!r} here. {MODULE_REMEDY}"
        ) from error
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise BadRequestError(f"Import path {path!r}: {module_name} has no {name!r}.") from error
    return found


def call_imported(path: str, option: str) -> Any:
    """Call the function that an import path names, without arguments, and return its result.

    Raises
    ------
    BadRequestError
        The function cannot be imported, is not a function, or raised; the message names the option.
    """
    try:
        return import_definition(path)()
    except Exception as error:
        # A user's function may raise anything.
        raise BadRequestError(f"{option}={path!r} failed: {summary_of(error)}") from error
