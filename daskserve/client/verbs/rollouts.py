"""The client's methods for rollouts: traffic moves to a new version step by step."""

from __future__ import annotations

import uuid
from typing import Any

from daskserve.client.instance.connection import Verbs


class RolloutVerbs(Verbs):
    """Methods of a `Client` that show and control rollouts.

    With ``model``, they are about the rollout of a model of the deployment's ``model_repository``. Each
    returns the state of the rollout as plain values: ``state``, ``version``, ``stable``, ``step``, ``why``,
    and during the rollout ``share``, ``replicas``, ``requests`` and ``gates``.
    """

    async def rollout_status(self, name: str, application: str = "", *, model: str = "") -> dict[str, Any]:
        """Return the state of a deployment's rollout, or how the last one ended.

        Parameters
        ----------
        application : str
            The application of the deployment ``name``. Empty: ``name`` is a tag, as in `status`.

        Raises
        ------
        NotFoundError
            There is no such deployment, or there was no rollout since its last change.
        """
        message = _message(name, application, model)
        found: dict[str, Any] = await self._call("rollout_status", **message)
        return found

    async def pause_rollout(self, name: str, application: str = "", *, model: str = "") -> dict[str, Any]:
        """Keep a rollout at its current step until `promote_rollout` or `abort_rollout`.

        Its gates stay in force.
        """
        return await self._steer("pause_rollout", **_message(name, application, model))

    async def promote_rollout(
        self, name: str, application: str = "", *, full: bool = False, model: str = ""
    ) -> dict[str, Any]:
        """Move a rollout to its next step without waiting any longer; with ``full``, to its end."""
        message = {**_message(name, application, model), "full": full}
        return await self._steer("promote_rollout", **message, request_id=uuid.uuid4().hex)

    async def abort_rollout(self, name: str, application: str = "", *, model: str = "") -> dict[str, Any]:
        """Undo a rollout; when this returns, this process's calls go to the old version only."""
        return await self._steer("abort_rollout", **_message(name, application, model))

    async def _steer(self, verb: str, **message: Any) -> dict[str, Any]:
        found: dict[str, Any] = await self._submit(verb, **message)
        await self._complete(found, blocking=True)
        return {name: value for name, value in found.items() if name != "snapshot"}


def _message(name: str, application: str, model: str) -> dict[str, Any]:
    return {"name": name, "application": application} | ({"model": model} if model else {})
