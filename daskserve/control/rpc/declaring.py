"""The verbs for the declared configuration, which files define instead of programs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from daskserve.cluster.protocols.base import verb
from daskserve.common import settings
from daskserve.common.formatting import capitalized
from daskserve.config_file.limits import excess
from daskserve.config_file.masking import shown
from daskserve.control.core import MAX_WAIT_S
from daskserve.control.decisions import restart as restart_decisions
from daskserve.control.decisions.goals import ChangeLimits
from daskserve.control.decisions.target_capacity import set_logging
from daskserve.control.declared import apply as applying
from daskserve.control.declared import views
from daskserve.control.declared.plan import completed, planned
from daskserve.control.records.declared import Origin
from daskserve.control.rpc.locking import LockingVerbs
from daskserve.errors import BadRequestError
from daskserve.loops.tasks import pause


class DeclaringVerbs(LockingVerbs):
    """The verbs for the declared configuration."""

    @verb
    async def apply_config(
        self,
        config: Mapping[str, Any],
        merge: bool = False,
        expected_version: int | None = None,
        by: str = "",
        source: str = "",
        version: str = "",
        request_id: str = "",
    ) -> dict[str, Any]:
        """Declare a configuration, and return its number before anything is built from it.

        Parameters
        ----------
        config : dict
            The plain values of a `daskserve.config_file.model.InstanceConfig`.
        expected_version : int, optional
            The number of the declaration that the caller has read.
        source, version : str
            The name of the file, and its version.
        """
        origin = Origin(by=by, source=source, version=version)
        return await self._apply(config, merge, expected_version, origin, request_id)

    @verb
    async def delete_applications(
        self, by: str = "", expected_version: int | None = None, request_id: str = ""
    ) -> dict[str, Any]:
        """Delete all applications in one change, including those that programs deployed."""
        return await self._apply(
            {applying.APPLICATIONS: []},
            False,
            expected_version,
            Origin(by=by),
            request_id,
            is_whole=True,
        )

    async def _apply(
        self,
        config: Mapping[str, Any],
        merge: bool,
        expected: int | None,
        origin: Origin,
        request_id: str,
        *,
        is_whole: bool = False,
    ) -> dict[str, Any]:
        _check_size(config)
        values = await _with_variables(config)
        async with self._deciding([request_id] if request_id else ()):
            applied = applying.apply(
                self._core.state,
                config,
                merges=merge,
                expected=expected,
                request_id=request_id,
                origin=origin,
                now=self._core.clock.wall(),
                new_goal=self._goal_id,
                values=values,
                is_whole=is_whole,
            )
            await self._core.writer.commit(applied.change)
            logging = set_logging(self._core.state, values, self._core.start_message.start_id)
            await self._core.writer.commit(logging)
        if logging:
            self._core.loop.reconfigure_replicas()
        self._core.loop.enqueue(applied.tags or None)
        return {"version": applied.number, "deleted": applied.deleted}

    @verb
    async def apply_text(
        self,
        text: str,
        name: str,
        merge: bool = False,
        expected_version: int | None = None,
        by: str = "",
        version: str = "",
        request_id: str = "",
    ) -> dict[str, Any]:
        """Declare the configuration in the text of a file; the answer contains warnings about the text."""
        found = await asyncio.to_thread(_read, text, name)
        answer = await self.apply_config(
            found.config.to_plain(),
            merge=merge,
            expected_version=expected_version,
            by=by,
            source=name,
            version=version,
            request_id=request_id,
        )
        return {**answer, "warnings": found.warnings}

    @verb
    async def plan_config(self, config: Mapping[str, Any], merge: bool = False) -> dict[str, Any]:
        """Return the changes that a configuration would make; builds its applications in workers."""
        core = self._core
        _check_size(config)
        values = await _with_variables(config)
        applying.check_routes(
            core.state,
            config[applying.APPLICATIONS],
            []
            if merge
            else applying.to_delete(core.state, [each["name"] for each in config["applications"]]),
        )
        built = await core.building.builders.build(config[applying.APPLICATIONS])
        apps = {}
        for name, each in built.items():
            apps[name] = planned(core.state, name, each, core.observed.unloadable.keys())
            await pause()  # lets other tasks run, because a thousand applications take half a second
        return completed(core.state, values, apps, merges=merge)

    @verb
    async def plan_text(self, text: str, name: str, merge: bool = False) -> dict[str, Any]:
        """Return the changes that the configuration in the text of a file would make."""
        found = await asyncio.to_thread(_read, text, name)
        return {**await self.plan_config(found.config.to_plain(), merge=merge), "warnings": found.warnings}

    @verb
    async def restart(
        self,
        application: str,
        deployment: str | None = None,
        by: str = "",
        request_id: str = "",
    ) -> dict[str, Any]:
        """Replace the replicas of an application, or of one deployment; the code does not change."""
        request_id = request_id or self._goal_id()
        async with self._deciding([request_id]):
            outcome = restart_decisions.restart(
                self._core.state,
                application,
                deployment,
                goal_id=self._goal_id(),
                request_id=request_id,
                limits=ChangeLimits(None, settings.timeouts().change_s),
                now=self._core.clock.wall(),
                by=by,
            )
            await self._core.writer.commit(outcome.change)
        self._core.loop.enqueue(self._core.state.apps.members(application))
        return {"goal": outcome.goal}

    @verb
    async def config_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of configurations."""
        return await asyncio.to_thread(_schema)

    @verb
    async def get_config(self, name: str | None = None, is_masked: bool = False) -> dict[str, Any]:
        """Return the declared configuration of one application or of all, perhaps without literal secrets."""
        found = views.config(self._core.state, name)
        return shown(found) if is_masked else found

    @verb
    async def wait_for_config(
        self, version: int, names: Sequence[str] | None = None, timeout_s: float = MAX_WAIT_S
    ) -> dict[str, Any]:
        """Wait until the applications of a declaration run or have failed, for at most 30 s.

        Then all proxies that answer send requests to the new replicas.

        Parameters
        ----------
        version : int
            The number of the declaration.
        names : sequence of str, optional
            Default: all applications that it has declared.
        """
        core = self._core
        deadline = core.clock.now() + min(timeout_s, MAX_WAIT_S)
        while True:
            ended = core.goal_ended
            found = views.progress(core.state, core.observed, version, names, core.building.waiting)
            left_s = deadline - core.clock.now()
            if found["is_done"]:
                return {**found, "snapshot": await core.barrier()}
            if left_s <= 0:
                return found
            try:
                await core.clock.wait_for(ended.wait(), left_s)
            except TimeoutError:
                pass


def _check_size(config: Mapping[str, Any]) -> None:
    if too_many := excess(config[applying.APPLICATIONS]):
        raise BadRequestError(f"{capitalized(too_many)}.")


async def _with_variables(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the instance's part of a configuration, with the values of this process's variables."""
    instance = {name: each for name, each in config.items() if name != applying.APPLICATIONS}
    return await asyncio.to_thread(_resolved, instance) if "${" in str(instance) else instance


def _resolved(instance: Mapping[str, Any]) -> Mapping[str, Any]:
    from daskserve.config_file.model import InstanceConfig
    from daskserve.config_file.reading import in_force

    # The HTTP and tracing options only apply when the instance starts, with the variables of the program that
    # starts it.
    wanted = {
        name: instance[name]
        for name in ("target_capacity", "logging_config", "references")
        if name in instance
    }
    return in_force(InstanceConfig(**wanted), settings.process_variables()).to_plain()


def _read(text: str, name: str) -> Any:
    # Imported in a thread on demand: only requests over HTTP contain text.
    from daskserve.config_file.reading import read

    return read(text, name)


def _schema() -> dict[str, Any]:
    from daskserve.config_file.json_schema import json_schema

    return json_schema()
