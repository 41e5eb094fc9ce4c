"""Rebuilds the applications of a project. Each version depends on the files that its code uses.

Problem: decorated code of a deployment is sent by value, and all other code by the names of its modules. So
the code of two versions of a project may look equal. Choice: a deployment whose code names a module of the
project gets a new version whenever the project's files change. Other deployments, such as one with a large
model whose class is sent by value, keep running when an unrelated file changes.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from daskserve.client.definitions.code_digest import code_digest, names_one_of
from daskserve.client.definitions.graph import digest_of
from daskserve.client.hosting.reloading.files import Patterns
from daskserve.client.verbs.applications import BuiltApplication
from daskserve.internals.cloudpickle import release_class_ids, take_class_ids
from daskserve.options.backend import BackendConfig
from daskserve.options.specs import ApplicationSpec, DeploymentSpec
from daskserve.payload.importing import (
    ImportPath,
    digest_of_file,
    digests_before,
    file_digest,
    forget,
    modules_in,
)


@dataclass(frozen=True, slots=True)
class Project:
    """The files of a project, in the process that builds its applications.

    Attributes
    ----------
    folders : tuple of str
        The folders whose modules are imported again.
    others : str
        Digest of the files that are not modules; every deployment may read them.
    recreates : bool
        Whether old replicas end before new ones start.
    """

    folders: tuple[str, ...]
    others: str = ""
    recreates: bool = False

    @contextmanager
    def imported(self) -> Iterator[None]:
        """Import the project again in a ``with`` block; if the block raises, restore the old modules."""
        with ImportPath.lock:
            # A file that changes during the import counts as changed the next time.
            before = digests_before.set(self._digests())
            gone = forget(modules_in(self.folders))
            classes = release_class_ids(gone)
            try:
                yield
            except BaseException:
                forget(modules_in(self.folders))
                sys.modules.update(gone)
                take_class_ids(classes)
                raise
            finally:
                digests_before.reset(before)

    def _digests(self) -> dict[str, str]:
        found = {}
        for name in Patterns(self.folders).snapshot():
            with suppress(OSError):  # the file was removed
                found[os.path.realpath(name)] = digest_of_file(name)
        return found

    def modules(self) -> dict[str, str]:
        """Return the digests of the project's modules that this process has imported."""
        return {name: file_digest(module) for name, module in modules_in(self.folders).items()}

    def versioned(self, built: BuiltApplication) -> BuiltApplication:
        """Return an application whose versions depend on the files that its code uses."""
        modules = self.modules()
        deployments = tuple(self._versioned(each, modules) for each in built.spec.deployments)
        return replace(built, spec=replace(built.spec, deployments=deployments))

    def _versioned(self, whole: DeploymentSpec, modules: Mapping[str, str]) -> DeploymentSpec:
        spec = whole.spec
        pickled = bytes(spec.parts[0]) if spec.parts else spec.code
        facts: list[Any] = [self.others] if self.others else []
        if names_one_of(pickled, modules):
            facts.append(sorted(modules.items()))
        if spec.user_version is not None:
            # A version that the user names does not depend on the code.
            facts.append(code_digest(spec.parts or (spec.code,)))
        changes: dict[str, Any] = {}
        if facts:
            changes["version"] = f"{spec.version}-{digest_of(*facts)}"
        if self.recreates:
            changes["config"] = spec.config.merged(BackendConfig(max_surge=0))
        return replace(whole, spec=replace(spec, **changes))


def digest_of_files(names: Sequence[str]) -> str:
    """Return the digest of some files; empty if there are no files."""
    digest = hashlib.sha256()
    for name in names:
        digest.update(name.encode(errors="surrogateescape") + b"\0")
        try:
            with open(name, "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError:
            digest.update(b"gone")
    return digest.hexdigest()[:16] if names else ""


def changed(spec: ApplicationSpec, ingress: Mapping[str, Any]) -> ApplicationSpec:
    """Return an application with some options of its ingress changed."""
    whole = spec.ingress
    config = whole.spec.config.merged(BackendConfig(**ingress), ends_autoscaling=True)
    last = replace(whole, spec=replace(whole.spec, config=config))
    return replace(spec, deployments=(*spec.deployments[:-1], last))
