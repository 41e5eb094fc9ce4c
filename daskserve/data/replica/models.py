"""The models that a replica loads from its ``model_repository``.

The controller sends the wanted versions, perhaps repeatedly. A replica loads missing versions one after
another, while it serves, then changes the default versions, then unloads the others. A version that fails to
load is not tried again until the controller sends a higher attempt number.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import os
import shutil
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

from daskserve.common import settings
from daskserve.common.clock import Clock
from daskserve.common.formatting import shown
from daskserve.context import LoadedModels, ModelSplit
from daskserve.data.multiplexing.multiplexer import Multiplexer
from daskserve.data.replica.environment.kept_folders import DRAFT, delete_unused, hold, mark_used
from daskserve.data.replica.execution.executor import UserExecutor
from daskserve.data.replica.user_code.definitions import is_async
from daskserve.data.replica.user_code.servable import Servable
from daskserve.errors import BadRequestError, RequestTimeoutError
from daskserve.loops.threads import in_daemon
from daskserve.payload.model_files import file_system, fingerprint, list_models
from daskserve.payload.packed_errors import packed_here

logger = logging.getLogger("daskserve.replica")

LOAD, UNLOAD = "load_model", "unload_model"
#: The number of hanging calls of ``load_model`` that additional threads replace.
MAX_STUCK = 3


class Models(Protocol):
    """The models of user code, in this process or in a child process."""

    async def want(self, wanted: Mapping[str, Any]) -> None:
        """Load and unload models until the loaded ones match the wanted ones; return before that.

        ``wanted`` is ``{name: {"versions": {version: attempt}, "default": version}}``. During a rollout,
        ``"split"`` has the ``key`` of its step, the new ``version`` and its ``share`` of the requests.
        """

    def facts(self) -> Mapping[str, Any]:
        """Return the loaded versions, the defaults, and the errors with their attempts; empty if there is no
        repository."""

    def multiplexed(self) -> Mapping[str, Any]:
        """Return the models of multiplexed functions; see `Multiplexer.facts`."""


class ReplicaModels(Models):
    """The models in the replica's own process."""

    def __init__(self, loaded: LoadedModels, repository: Mapping[str, Any] | None, clock: Clock) -> None:
        self._loaded = loaded
        self._clock = clock
        #: The start time of each load.
        self._loading: dict[str, float] = {}
        self._repository = repository
        self._parts: tuple[UserExecutor, Servable] | None = None
        self._wanted: Mapping[str, Any] | None = None
        self._errors: dict[str, tuple[int, str]] = {}
        self._task: asyncio.Task[None] | None = None
        #: The models that user code loads with its multiplexed functions.
        self.multiplexer = Multiplexer()
        #: File descriptors whose locks protect downloads from deletion.
        self._held: dict[str, int] = {}

    async def start(
        self, executor: UserExecutor, servable: Servable, wanted: Mapping[str, Any] | None
    ) -> None:
        """Load the models with which the replica starts; raise if one fails.

        ``wanted`` is None if the controller does not know the models yet; then the repository is read here.
        """
        if self.multiplexer.find(servable.target):
            await executor.run_async(self.multiplexer.preload)
        if self._repository is None:
            return
        if not servable.has_hook(LOAD):
            raise BadRequestError(
                "It has model_repository, but its class has no load_model(name, version, path) method."
            )
        if wanted is None:
            wanted = await asyncio.to_thread(_newest, self._repository)
        for name, each in wanted.items():
            for version in each["versions"]:
                await self._load(executor, servable, name, version)
            if each["default"] in each["versions"]:
                self._loaded.defaults[name] = each["default"]
        self._parts = executor, servable

    async def want(self, wanted: Mapping[str, Any]) -> None:
        self._wanted = wanted
        if self._parts is not None and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._apply(*self._parts), name="daskserve-models")

    def facts(self) -> Mapping[str, Any]:
        if self._repository is None:
            return {}
        return {
            "loaded": {name: list(versions) for name, versions in self._loaded.versions.items()},
            "defaults": dict(self._loaded.defaults),
            "loading": {key: self._clock.now() - since for key, since in self._loading.items()},
            "errors": {key: list(each) for key, each in self._errors.items()},
            "splits": {name: each.plain() for name, each in self._loaded.splits.items()},
        }

    def multiplexed(self) -> Mapping[str, Any]:
        return self.multiplexer.facts()

    async def close(self, executor: UserExecutor, grace_s: float) -> None:
        """Stop loading, and unload the multiplexed models, within half of the grace period."""
        if self.multiplexer.is_used:
            with suppress(TimeoutError):  # the other half of the time is for the destructor
                await self._clock.wait_for(executor.run_async(self.multiplexer.close), grace_s / 2)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        for key in list(self._held):
            self._release(*key.split("/", 1))

    async def _apply(self, executor: UserExecutor, servable: Servable) -> None:
        while (wanted := self._wanted) is not None:
            self._wanted = None
            self._split(wanted)  # first, because a rollback must not wait for loads
            await self._load_missing(executor, servable, wanted)
            for name, each in wanted.items():
                if each["default"] in self._loaded.versions.get(name, {}):
                    self._loaded.defaults[name] = each["default"]
            self._split(wanted)
            for name, versions in list(self._loaded.versions.items()):
                for version in set(versions) - set(wanted.get(name, {}).get("versions", ())):
                    await self._unload(executor, servable, name, version)

    def _split(self, wanted: Mapping[str, Any]) -> None:
        """Set the splits of models that are rolled out; the counts of an unchanged step are kept."""
        splits, before = {}, self._loaded.splits
        for name, each in wanted.items():
            if (found := each.get("split")) is not None:
                known = before.get(name)
                same = known is not None and known.key == found["key"]
                splits[name] = known if known is not None and same else ModelSplit(**found)
        self._loaded.splits = splits

    async def _load_missing(
        self, executor: UserExecutor, servable: Servable, wanted: Mapping[str, Any]
    ) -> None:
        attempts = {
            (name, version): int(attempt)
            for name, each in wanted.items()
            for version, attempt in each["versions"].items()
        }
        known = {f"{name}/{version}" for name, version in attempts}
        self._errors = {key: each for key, each in self._errors.items() if key in known}
        for (name, version), attempt in attempts.items():
            key = f"{name}/{version}"
            if version in self._loaded.versions.get(name, {}):
                continue
            if key in self._errors and self._errors[key][0] >= attempt:
                continue
            try:
                await self._load(executor, servable, name, version)
            except Exception as error:  # user code may raise anything; the status shows the error
                packed = packed_here(error)
                logger.error("Version %s of model %s could not be loaded\n%s", version, name, packed.text)
                self._errors[key] = attempt, packed.summary
                packed.error = None  # the error refers to the user's object
            else:
                self._errors.pop(key, None)

    async def _load(self, executor: UserExecutor, servable: Servable, name: str, version: str) -> None:
        """Load a version within ``load_timeout_s``; if the code hangs, it stays in its thread."""
        assert self._repository is not None
        url, limit_s = self._repository["url"], self._repository["load_timeout_s"]
        self._loading[f"{name}/{version}"] = self._clock.now()
        try:
            doing = "the files of the version were not fetched"
            path, held = await _fetched_within(limit_s, self._clock, url, name, version)
            if held is not None:
                self._release(name, version)
                self._held[f"{name}/{version}"] = held
            doing = f"{LOAD}() had not returned"
            executor.background.limit = max(
                executor.background.limit, 1 + min(executor.background.abandoned, MAX_STUCK)
            )
            call = _call(executor, servable, LOAD, name, version, path)
            model = await self._clock.wait_for(call, limit_s)
        except TimeoutError as error:
            self._release(name, version)
            if self._clock.now() - self._loading[f"{name}/{version}"] < 0.99 * limit_s:
                raise  # an error of user code
            raise RequestTimeoutError(
                f"{doing} after {shown(limit_s)} s, the load_timeout_s of model_repository."
            ) from error
        except BaseException:
            self._release(name, version)
            raise
        finally:
            del self._loading[f"{name}/{version}"]
        self._loaded.versions.setdefault(name, {})[version] = model
        logger.info("Version %s of model %s is loaded", version, name)

    async def _unload(self, executor: UserExecutor, servable: Servable, name: str, version: str) -> None:
        versions = self._loaded.versions[name]
        del versions[version]  # first, so that new requests do not use it
        if self._loaded.defaults.get(name) == version:
            del self._loaded.defaults[name]
        if not versions:
            del self._loaded.versions[name]
        if servable.has_hook(UNLOAD):
            try:
                await _call(executor, servable, UNLOAD, name, version)
            except Exception as error:  # raised by user code; no request uses the version
                packed = packed_here(error)
                logger.error(
                    "unload_model() failed for version %s of model %s\n%s", version, name, packed.text
                )
                packed.error = None
        self._release(name, version)
        logger.info("Version %s of model %s is unloaded", version, name)

    def _release(self, name: str, version: str) -> None:
        """Unlock a downloaded version, so that it may be deleted later."""
        held = self._held.pop(f"{name}/{version}", None)
        if held is not None:
            os.close(held)


async def _call(executor: UserExecutor, servable: Servable, hook: str, *args: str) -> Any:
    """Call a method of the user's class, outside of the threads for requests."""
    method = servable.hook(hook)
    if is_async(method):
        return await executor.run_async(method, *args)
    return await executor.run_sync(method, *args, threads=executor.background)


def _newest(repository: Mapping[str, Any]) -> Mapping[str, Any]:
    if repository["mode"] != "poll":
        return {}
    found = list_models(repository["url"])
    return {
        name: {
            "versions": dict.fromkeys(versions[-repository["keep_versions"] :], 0),
            "default": versions[-1],
        }
        for name, versions in found.items()
    }


async def _fetched_within(limit_s: float, clock: Clock, *place: str) -> tuple[str, int | None]:
    """Do the same as `fetched` within a time limit. A download that ends later is not protected."""
    # Not in a thread of the worker's pool, because the download may hang.
    fetching = asyncio.ensure_future(in_daemon("daskserve-download", lambda _: fetched(*place)))
    try:
        return await clock.wait_for(asyncio.shield(fetching), limit_s)
    except BaseException:
        fetching.add_done_callback(_let_go)
        raise


def _let_go(fetching: asyncio.Future[tuple[str, int | None]]) -> None:
    if not fetching.cancelled() and fetching.exception() is None:
        _, held = fetching.result()
        if held is not None:
            os.close(held)


def fetched(url: str, name: str, version: str) -> tuple[str, int | None]:
    """Return the local path of a version; download it if it is remote, which may take long.

    Downloads are kept and deleted in the same way as the environments of replicas. The returned descriptor
    protects a download from deletion until it is closed.
    """
    files, root = file_system(url)
    place = f"{root}/{name}/{version}"
    if not files.isdir(place):
        raise FileNotFoundError(f"There is no folder {name}/{version} in the model repository.")
    if "file" in (files.protocol if isinstance(files.protocol, (tuple, list)) else (files.protocol,)):
        return place, None
    key = hashlib.sha256(f"{url}\n{place}\n{fingerprint(files, place)}".encode()).hexdigest()[:20]
    process = settings.process()
    folder = process.environments / key
    with suppress(FileNotFoundError):
        mark_used(folder)
        return str(folder), hold(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock_file = folder.with_name(f"{DRAFT}{key}.lock")
    with open(lock_file, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one download serves all replicas of this machine
        if not folder.is_dir():
            draft = folder.with_name(f"{DRAFT}{uuid.uuid4().hex}")
            try:
                files.get(f"{place}/", f"{draft}/", recursive=True)
                draft.rename(folder)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        mark_used(folder)
        held = hold(folder)
        delete_unused(folder, process.environments_days)
    return str(folder), held
