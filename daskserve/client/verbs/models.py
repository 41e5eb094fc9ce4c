"""The client's verbs for the models of deployments with a ``model_repository``."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from daskserve.client.instance.connection import Verbs
from daskserve.errors import DeployError, NotFoundError, RequestTimeoutError

#: How long one call waits for a version.
WAIT_S = 25.0


class ModelVerbs(Verbs):
    """Methods of a `Client` for models; ``deployment`` is the deployment's tag, such as ``"shop/Model"``."""

    async def list_models(self, deployment: str) -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
        """Return the models of a deployment by name and version.

        Each version has its ``state``, the ``reason`` of a failure, and ``is_default``. The states are
        AVAILABLE (in the folder, not loaded), LOADING, ROLLING_OUT, READY, FAILED and TAKEN_BACK.

        Raises
        ------
        BadRequestError
            The deployment has no ``model_repository``, or that cannot be read.
        NotFoundError
            There is no such deployment.
        """
        found: Mapping[str, Mapping[str, Mapping[str, Any]]] = await self._call(
            "list_models", name=deployment
        )
        return found

    async def load_model(
        self,
        deployment: str,
        model: str,
        version: str | None = None,
        *,
        default: bool = True,
        timeout_s: float | None = None,
    ) -> str:
        """Load a version of a model in all replicas, and return its name once all of them have it.

        Replicas that start later load the version before they serve. If a replica cannot load the version,
        all replicas unload it, and the previous default version keeps serving. With a ``rollout``, the
        version becomes the default step by step after this has returned; see
        `daskserve.Client.rollout_status`.

        Parameters
        ----------
        version : str, optional
            Default: the newest version in the folder.
        default : bool
            Whether it becomes the default version once it is loaded.
        timeout_s : float, optional
            How long to wait; after that, loading continues.

        Raises
        ------
        NotFoundError The folder does not have this version, or it was unloaded during the call. DeployError
            A replica could not load it; the message says why.
        RequestTimeoutError
            A `TimeoutError`: it took longer than ``timeout_s``.
        """
        answer = await self._submit(
            "load_model", name=deployment, model=model, version=version, is_default=default
        )
        chosen = str(answer["version"])
        clock = self._connection.cluster_connection.clock
        deadline = None if timeout_s is None else clock.now() + timeout_s
        while True:
            wait_s = WAIT_S if deadline is None else max(0.0, min(WAIT_S, deadline - clock.now()))
            found = await self._call_until(
                deadline, "wait_for_model", name=deployment, model=model, version=chosen, timeout_s=wait_s
            )
            what = f"Version {chosen} of model {model!r}"
            late = f"{what} was not loaded within {timeout_s} s; loading continues."
            if found is None:
                raise RequestTimeoutError(late)
            if found["state"] in ("READY", "ROLLING_OUT"):
                return chosen
            if found["state"] == "TAKEN_BACK":
                raise DeployError(f"{what} was rolled back: {found['reason']}")
            if found["state"] == "FAILED":
                raise DeployError(f"{what} could not be loaded: {found['reason']}")
            if not found["state"]:
                raise NotFoundError(f"{what} was unloaded before it was ready.")
            if deadline is not None and clock.now() >= deadline:
                raise RequestTimeoutError(late)

    async def unload_model(self, deployment: str, model: str, version: str | None = None) -> None:
        """Unload one or all versions of a model from all replicas; return before the replicas have unloaded
        them.

        If this was the default version, the newest loaded version becomes the default.

        Raises
        ------
        NotFoundError
            The version is not loaded.
        """
        await self._submit(
            "unload_model", name=deployment, model=model, version=version, request_id=uuid.uuid4().hex
        )

    async def set_default_model(self, deployment: str, model: str, version: str) -> None:
        """Set the default version of a model; the version must be loaded.

        Raises
        ------
        NotFoundError
            The version is not loaded.
        """
        await self._submit("set_default_model", name=deployment, model=model, version=version)
