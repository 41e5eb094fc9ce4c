"""Building the application of an import path, in this process or in a worker.

The process that builds it imports the user's module. In a cluster that was started for the application, this
is the worker that gets its first replica, so that the module is imported once. In any other cluster it is the
caller, whose code is deployed: a worker may have imported an older version of the module.
"""

from __future__ import annotations

import importlib
import sys
import traceback
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

from pydantic import ValidationError

from daskserve.client.definitions.graph import ApplicationGraph
from daskserve.client.definitions.overrides import Overrides, environment_of
from daskserve.client.definitions.targets import application_of
from daskserve.client.hosting.reloading.project import Project
from daskserve.client.verbs.applications import BuiltApplication, RunTarget, build
from daskserve.common import settings
from daskserve.common.formatting import shown
from daskserve.common.types import InstanceName, split_import_path
from daskserve.config_file.model import ApplicationConfig
from daskserve.config_file.option_checks import text_of
from daskserve.config_file.reading import in_force
from daskserve.data.replica.environment.working_dir import local_folder
from daskserve.errors import BadRequestError, ReplicaStartError, UnavailableError
from daskserve.internals.cloudpickle import release_class_ids
from daskserve.payload.importing import (
    MODULE_REMEDY,
    ImportPath,
    ModuleScan,
    file_digest,
    folder_of,
    forget,
    have_changed,
)
from daskserve.payload.used_modules import modules_named_in, used_by

#: Timeout of the wait for another import, which may hang.
LOCK_S = 20.0
#: Modules whose frames precede the user's module in a traceback.
_ON_THE_WAY = ("daskserve.", "contextlib", "importlib", "pydantic.")


def build_path(target: RunTarget, instance: InstanceName, timeout_s: float | None) -> BuiltApplication:
    """Build an application whose target may be an import path.

    Raises
    ------
    BadRequestError, TypeError
        The target cannot be deployed.
    ReplicaStartError
        The user's code raised; the error has the traceback from there on.
    """
    with users_errors(target.name, target.target):
        (built,) = build([target], instance=instance, timeout_s=timeout_s)
        return built


def build_configured(
    config: ApplicationConfig,
    instance: InstanceName = "",
    timeout_s: float | None = None,
    scan: ModuleScan | None = None,
) -> BuiltApplication:
    """Build an application of a configuration file in this process, which imports the code.

    References to environment variables are resolved in this process. The file's options override those of the
    code.

    Parameters
    ----------
    scan : ModuleScan, optional
        The scan that all applications built together share.

    Raises
    ------
    ConfigFileError
        A variable is missing.
    BadRequestError, TypeError
        The application cannot be deployed, or has no deployment of a name in its configuration.
    ReplicaStartError
        The user's code raised; the error has the traceback from there on.
    """
    found = in_force(config, settings.process_variables())
    with users_errors(found.name, found.import_path), _importing_from(found) as found:
        overrides = Overrides(found)
        with _current(found, scan or ModuleScan()) as modules:
            graph = ApplicationGraph(application_of(found.import_path, found.args), found.name)
        overrides.check([name for name, _ in graph.deployments])
        spec = graph.spec(
            route=found.route_prefix,
            request_id=uuid.uuid4().hex,
            timeout_s=timeout_s,
            changed=overrides.applied,
            modules=modules(),
            instance=instance,
        )
        return BuiltApplication(spec, graph.handles)


@contextmanager
def _import_lock() -> Iterator[None]:
    """Hold the lock of imports; raise `UnavailableError` if another import holds it for too long."""
    if not ImportPath.lock.acquire(timeout=LOCK_S):
        raise UnavailableError(
            f"Another import in this process has run for {shown(LOCK_S)} s. A module must not block or "
            "start to serve while it is imported; if it hangs, restart the worker."
        )
    try:
        yield
    finally:
        ImportPath.lock.release()


@contextmanager
def _current(config: ApplicationConfig, scan: ModuleScan) -> Iterator[Callable[[], Mapping[str, str]]]:
    """Import an application in a ``with`` block, again if a file of its project has changed since.

    Yields a function that returns the modules of the project that it uses, with their digests.
    """
    root = split_import_path(config.import_path)[0]
    folder = folder_of(root)
    if folder is None:
        yield dict
        return

    def modules() -> dict[str, str]:
        used = used_by([root, *modules_named_in(config.args)], scan.modules_in(folder))
        return {name: file_digest(module) for name, module in used.items()}

    with _import_lock():
        if have_changed(scan.modules_in(folder).values()):
            with Project((folder,)).imported():
                yield modules
        else:
            yield modules


@contextmanager
def _importing_from(config: ApplicationConfig) -> Iterator[ApplicationConfig]:
    """Import from the ``working_dir`` of an application's environment in a ``with`` block.

    Yields the configuration with its ``working_dir`` replaced by a folder on this machine.
    """
    environment = environment_of(config.env)
    if environment is None or environment.working_dir is None:
        yield config
        return
    folder = local_folder(environment.working_dir, settings.process().environments)
    local = environment.model_copy(update={"working_dir": str(folder)})
    with _import_lock():
        # Modules with the same names are hidden during the import, unless they are installed.
        tops = {each.stem for each in folder.iterdir()} - {"__main__", "daskserve"}
        tops = {each for each in tops if each not in sys.modules or folder_of(each) is not None}
        hidden = forget(_below(tops))
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
        try:
            yield config.model_copy(update={"env": local.to_plain()})
        finally:
            with suppress(ValueError):  # the user's module may have removed it
                sys.path.remove(str(folder))
            release_class_ids(forget(_below(tops)))
            sys.modules.update(hidden)


def _below(packages: Collection[str]) -> list[str]:
    """Return the names of the imported modules of these packages."""
    return [name for name in sys.modules.copy() if name.partition(".")[0] in packages]


@contextmanager
def users_errors(name: str, target: Any) -> Iterator[None]:
    """Raise the errors of the user's code as `ReplicaStartError`."""
    try:
        yield
    except (Exception, SystemExit) as error:
        # A user's module may raise anything, even SystemExit.
        frames = _user_frames(error)
        if frames is None and not isinstance(error, (SyntaxError, ValidationError)):
            raise
        if frames is None and isinstance(error, ValidationError):
            text = f"Application {name!r} cannot be built from {target!r}: {text_of(error)}"
            raise BadRequestError(text) from error
        remedy = "Correct the code, and run it again."
        if isinstance(error, ModuleNotFoundError):
            remedy = MODULE_REMEDY
        raise ReplicaStartError(
            f"Application {name!r} cannot be built from {target!r}: {type(error).__name__}: "
            f"{error}. {remedy}",
            user_traceback="".join(traceback.format_exception(type(error), error, frames)),
        ) from error


def _user_frames(error: BaseException) -> TracebackType | None:
    """Return the part of a traceback from the first frame of user code; None if there is none."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith(_ON_THE_WAY):
        frames = frames.tb_next
    return frames
