"""The verbs for the models of deployments with a ``model_repository``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from daskserve.cluster.protocols.base import verb
from daskserve.common.copying import replace
from daskserve.control.core import MAX_WAIT_S
from daskserve.control.decisions import backends as backend_decisions
from daskserve.control.decisions.history.events import WHOLE
from daskserve.control.records import model_decisions
from daskserve.control.records.models import ModelsRecord, ModelState
from daskserve.control.records.records import BackendRecord
from daskserve.control.rpc.locking import LockingVerbs
from daskserve.control.views.rollouts import model_texts
from daskserve.errors import BadRequestError, NotFoundError
from daskserve.options.environment import ModelRepository
from daskserve.payload.error_text import summary_of
from daskserve.payload.model_files import list_models


class ModelVerbs(LockingVerbs):
    """The verbs for the models of deployments."""

    @verb
    async def list_models(self, name: str, has_folder: bool = True) -> dict[str, Any]:
        """Return the models of a deployment, with the versions in its folder that are not loaded.

        Each version has ``state``, ``reason`` and ``is_default``; a version that is not loaded has the state
        AVAILABLE.
        """
        backend, repository = self._find(name)
        record = self._core.state.models.get(backend.tag, ModelsRecord(backend.tag))
        folder = await self._read(repository) if has_folder else {}
        found: dict[str, Any] = {
            model: {version: _entry("AVAILABLE") for version in versions}
            for model, versions in folder.items()
        }
        texts = model_texts(self._core.observed, backend, record)
        for model, versions in record.models.items():
            for version, each in versions.items():
                is_new = each["state"] == ModelState.ROLLING_OUT
                reason = texts.get(model, "") if is_new else each["reason"]
                is_default = record.defaults.get(model) == version
                found.setdefault(model, {})[version] = _entry(each["state"], reason, is_default)
        return found

    @verb
    async def load_model(
        self, name: str, model: str, version: str | None = None, is_default: bool = True, by: str = ""
    ) -> dict[str, Any]:
        """Make all replicas load a version, by default the newest; return its name before they have loaded
        it."""
        _, repository = self._find(name)
        self._check_explicit(repository)
        versions = (await self._read(repository)).get(model, [])
        chosen = version if version is not None else next(reversed(versions), "")
        if chosen not in versions:
            what = f"Model {model!r}" if version is None else f"Version {version!r} of model {model!r}"
            raise NotFoundError(
                f"{what} is not in the model repository; versions there: {', '.join(versions) or 'none'}."
            )
        options: dict[str, Any] = {
            "is_next": is_default,
            "rolls_out": repository.rollout is not None,
            "by": by,
        }
        await self._decide(name, by, lambda each: model_decisions.loaded(each, model, chosen, **options))
        return {"version": chosen}

    @verb
    async def unload_model(
        self, name: str, model: str, version: str | None = None, by: str = "", request_id: str = ""
    ) -> None:
        """Make all replicas unload a version, or all versions of a model; retrying a call changes nothing."""
        _, repository = self._find(name)
        self._check_explicit(repository)

        def decide(record: ModelsRecord) -> ModelsRecord:
            if request_id and record.unloaded_by == request_id:
                return record
            return replace(model_decisions.unloaded(record, model, version), unloaded_by=request_id)

        await self._decide(name, by, decide)

    @verb
    async def set_default_model(self, name: str, model: str, version: str, by: str = "") -> None:
        """Set the default version of a model, which must be READY."""
        await self._decide(name, by, lambda each: model_decisions.with_default(each, model, version))

    @verb
    async def wait_for_model(self, name: str, model: str, version: str, timeout_s: float) -> dict[str, Any]:
        """Return the state of a version once it is no longer LOADING, or after a time limit; ``""`` if it is
        unknown."""
        clock = self._core.clock
        deadline = clock.now() + min(timeout_s, MAX_WAIT_S)
        while True:
            changed = self._core.writer.changed
            backend, _ = self._find(name)
            record = self._core.state.models.get(backend.tag, ModelsRecord(backend.tag))
            entry = record.models.get(model, {}).get(version, {"state": "", "reason": ""})
            left_s = deadline - clock.now()
            if entry["state"] != ModelState.LOADING or left_s <= 0:
                return {"state": entry["state"], "reason": entry["reason"]}
            try:
                await clock.wait_for(changed.wait(), left_s)
            except TimeoutError:
                pass

    def _find(self, name: str) -> tuple[BackendRecord, ModelRepository]:
        backend = backend_decisions.find(self._core.state, name)
        repository = backend.config.model_repository
        if repository is None:
            raise BadRequestError(
                f"The option model_repository of {backend.display_name} is not set; it says where its models "
                "are."
            )
        return backend, repository

    @staticmethod
    def _check_explicit(repository: ModelRepository) -> None:
        if repository.mode != "explicit":
            raise BadRequestError(
                "The newest versions in the folder are loaded, because mode is 'poll'; set mode='explicit' "
                "in model_repository to load and unload models yourself."
            )

    async def _read(self, repository: ModelRepository) -> dict[str, list[str]]:
        try:
            reading = partial(list_models, repository.url)
            return await self._core.observed.folders.read(repository.url, reading, self._core.clock)
        except Exception as error:  # file systems raise errors of many libraries
            raise BadRequestError(f"The model repository cannot be read: {summary_of(error)}") from None

    async def _decide(self, name: str, by: str, decide: Callable[[ModelsRecord], ModelsRecord]) -> None:
        async with self._deciding():
            backend, _ = self._find(name)
            before = self._core.state.models.get(backend.tag, ModelsRecord(backend.tag))
            after = decide(before)
            if after != before:
                await self._core.writer.commit({after.key: after}, causes={WHOLE: by})


def _entry(state: str, reason: str = "", is_default: bool = False) -> dict[str, Any]:
    return {"state": state, "reason": reason, "is_default": is_default}
