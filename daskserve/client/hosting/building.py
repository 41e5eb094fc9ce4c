"""Building the application of an import path, in this process or in a worker.

The process that builds it imports the user's module. In a cluster that was started for the application, this
is the worker that gets its first replica, so that the module is imported once. In any other cluster it is the
caller, whose code is deployed: a worker may have imported an older version of the module.
"""

from __future__ import annotations

import traceback
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from pydantic import ValidationError

from daskserve.client.definitions.graph import ApplicationGraph
from daskserve.client.definitions.overrides import Overrides
from daskserve.client.definitions.targets import application_of
from daskserve.client.verbs.applications import BuiltApplication, RunTarget, build
from daskserve.common import settings
from daskserve.common.types import InstanceName
from daskserve.config_file.model import ApplicationConfig
from daskserve.config_file.references import resolved
from daskserve.errors import BadRequestError, ReplicaStartError
from daskserve.payload.importing import MODULE_REMEDY, import_definition

#: The modules whose frames lead from here to the user's module.
_ON_THE_WAY = ("daskserve.", "importlib", "pydantic.")


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


def import_path(target: RunTarget) -> None:
    """Import the code of an import path; see `build_path`."""
    with users_errors(target.name, target.target):
        import_definition(target.target)


def build_configured(
    config: ApplicationConfig, instance: InstanceName = "", timeout_s: float | None = None
) -> BuiltApplication:
    """Build an application of a configuration file in this process, which imports the code.

    References to variables get the values that they have in this process. The options of the file are applied
    to those of the code.

    Raises
    ------
    ConfigFileError
        A variable is missing.
    BadRequestError, TypeError
        The application cannot be deployed, or has no deployment of a name in its configuration.
    ReplicaStartError
        The user's code raised; the error has the traceback from there on.
    """
    found = resolved(config, settings.process_variables())
    overrides = Overrides(found)
    with users_errors(found.name, found.import_path):
        graph = ApplicationGraph(application_of(found.import_path, found.args), found.name)
        overrides.check([name for name, _ in graph.deployments])
        spec = graph.spec(
            route=found.route_prefix,
            request_id=uuid.uuid4().hex,
            timeout_s=timeout_s,
            changed=overrides.applied,
            instance=instance,
        )
        return BuiltApplication(spec, graph.handles)


@contextmanager
def users_errors(name: str, target: Any) -> Iterator[None]:
    """Raise the errors of the user's code as `ReplicaStartError`."""
    try:
        yield
    except (Exception, SystemExit) as error:
        # A user's module may raise anything, and may be a script that ends.
        frames = _user_frames(error)
        if frames is None and not isinstance(error, (SyntaxError, ValidationError)):
            raise
        if frames is None and isinstance(error, ValidationError):
            raise BadRequestError(str(error)) from error
        remedy = "Correct the code, and run it again."
        if isinstance(error, ModuleNotFoundError):
            remedy = MODULE_REMEDY
        raise ReplicaStartError(
            f"Application {name!r} cannot be built from {target!r}: {type(error).__name__}: "
            f"{error}. {remedy}",
            user_traceback="".join(traceback.format_exception(type(error), error, frames)),
        ) from error


def _user_frames(error: BaseException) -> TracebackType | None:
    """Return a traceback from the first frame of the user on; None if there is none."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith(_ON_THE_WAY):
        frames = frames.tb_next
    return frames
