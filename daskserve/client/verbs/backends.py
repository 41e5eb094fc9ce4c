"""The client's methods for backends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from daskserve.client.definitions.deployments import UNSET
from daskserve.client.definitions.specs import check_name, join_config, make_spec, split_config
from daskserve.client.definitions.unwrapping import unwrapped
from daskserve.client.instance.connection import Verbs
from daskserve.common import settings
from daskserve.common.types import GoalId
from daskserve.options.actor import ActorOptions
from daskserve.options.backend import BackendConfig
from daskserve.options.fields.base import parse_options
from daskserve.options.fields.bounds import checked_number


class BackendVerbs(Verbs):
    """Methods of a `Client` that create, change and delete backends."""

    async def create_backend(
        self,
        /,
        backend_tag: str,
        backend_def: Any,
        *init_args: Any,
        actor_options: ActorOptions | Mapping[str, Any] | None = None,
        config: BackendConfig | Mapping[str, Any] | None = None,
        env: Any = None,
        timeout_s: float | None = None,
        ray_actor_options: Mapping[str, Any] | None = None,
        blocking: bool = True,
        **init_kwargs: Any,
    ) -> GoalId | None:
        """Register a backend and return when all its replicas run.

        Parameters
        ----------
        backend_tag : str
            The backend's name, without ``#`` and ``/``.
        backend_def
            A function, a class, an ASGI application, or an import path such as ``"pkg.mod.Name"`` that the
            replicas import. A class without ``__call__`` is called by its methods' names: by handle, and over
            HTTP with the option ``method_header``. A deployment brings its own options and arguments; those
            of this call come first.
        *init_args, **init_kwargs
            Arguments for the constructor of a class.
        actor_options : ActorOptions or dict, optional
            Resources of each replica and restrictions on its placement. ``ray_actor_options`` is an alias.
        config : BackendConfig or dict, optional
        env : Environment, dict, CondaEnv, str or path, optional
            The environment of the replicas, each of which then runs in its own process: packages,
            variables and files as in `Environment`, or only a Python, as a `CondaEnv` or its name, or the
            path of a virtualenv or conda environment. Every worker that may run the backend must have that
            Python, with this version of daskserve and the worker's version of Python. None means the
            worker's environment (not the caller's, as in the classic system).
        timeout_s : float, optional
            Timeout of the whole change, in seconds; then the backend is removed and the call fails. Default:
            the change fails after ``daskserve.timeouts.change-s`` (60 seconds) without progress, or once a
            constructor takes longer than the option ``start_timeout_s``.
        blocking : bool
            Whether to wait; see the return value.

        Returns
        -------
        str or None
            With ``blocking=False``, the goal for `wait_for_goal`; None if there is nothing to wait for.

        Raises
        ------
        AlreadyRegisteredError
            The tag is taken.
        BadRequestError, TypeError, ValueError
            The arguments are wrong, or a worker does not have the environment.
        VersionMismatchError
            The environment has no daskserve, or another version of daskserve or Python.
        ReplicaStartError
            The constructor failed too often (see ``max_constructor_retry_count``), or packages of the
            environment could not be installed; the error carries the traceback or the installer's output.
        NoCapacityError
            No worker had room within ``timeout_s``, or ``daskserve.timeouts.change-s``.
        RequestTimeoutError
            A `TimeoutError`: the change was not complete within ``timeout_s``, made no progress, or a
            constructor took longer than ``start_timeout_s``.
        SupersededError, DeletedError
            Another call changed or deleted the backend before this change was complete.
        """
        self._connection.check_open()
        check_name(backend_tag, "backend_tag")
        found, args, kwargs = unwrapped(backend_tag, backend_def, init_args, init_kwargs)
        deployment = found.options(
            config=config,
            actor_options=actor_options,
            ray_actor_options=ray_actor_options,
            env=UNSET if env is None else env,
        )
        spec = make_spec(
            backend_tag,
            deployment.definition,
            args,
            kwargs,
            actor_options=deployment.actor_options,
            config=deployment.config,
            timeout_s=timeout_s,
            user_version=deployment.version,
            env=deployment.env,
            kind="backend",
        )
        await self._share()
        async with self._withdrawn_if_interrupted(spec.request_id):
            return await self._change("create_backend", blocking=blocking, spec=spec)

    async def update_backend_config(
        self,
        backend_tag: str,
        config_options: BackendConfig | Mapping[str, Any],
        *,
        timeout_s: float | None = None,
        blocking: bool = True,
    ) -> GoalId | None:
        """Change the given options of a backend and return when its replicas use them; others do not change.

        A change of ``user_config`` calls ``reconfigure`` on one replica after another; no replica restarts.
        With ``blocking=False`` the call returns immediately, with the goal for `wait_for_goal`.

        Raises
        ------
        TypeError
            The options are neither a `BackendConfig` nor a dict.
        NotRegisteredError
            There is no such backend.
        SupersededError, DeletedError
            Another call changed or deleted the backend before this change was complete.
        """
        if config_options is None:
            raise TypeError("config_options must be a BackendConfig or a dict of its options, got None")
        config = parse_options(BackendConfig, config_options, what="config_options")
        sealed, user_config = split_config(config)
        return await self._change(
            "update_backend_config",
            blocking=blocking,
            tag=backend_tag,
            config=sealed.to_plain(),
            user_config=user_config,
            sets_user_config="user_config" in config.model_fields_set,
            timeout_s=timeout_s,
            progress_timeout_s=settings.timeouts().change_s,
        )

    async def scale(self, name: str, target_num_replicas: int) -> int:
        """Set the number of replicas of an externally scaled backend or deployment and return it.

        The number is recorded when this returns, and outlives the controller and the replicas. Replicas start
        or stop afterwards. A POST to the scheduler's HTTP server does the same, see docs/autoscaling.md.

        Raises
        ------
        ExternalScalerDisabledError
            The config does not have ``external_scaler_enabled=True``.
        NotFoundError
            There is no such backend.
        BadRequestError
            The number is not an integer, or is less than 1.
        """
        return int(await self._call("scale", name=name, number=checked_number(target_num_replicas)))

    async def get_backend_config(self, backend_tag: str) -> BackendConfig:
        """Return a backend's config; `NotRegisteredError` (a `ValueError`) if there is no such backend."""
        return join_config(await self._call("get_backend_config", tag=backend_tag))

    async def list_backends(self) -> dict[str, BackendConfig]:
        """Return the config of every backend, by tag."""
        return {tag: join_config(found) for tag, found in (await self._call("list_backends")).items()}

    async def delete_backend(
        self, backend_tag: str, force: bool = False, *, blocking: bool = True
    ) -> GoalId | None:
        """Stop a backend's replicas and remove the backend; do nothing if the tag is unknown.

        Parameters
        ----------
        force : bool
            Whether to cancel running requests instead of letting them finish.
        blocking : bool
            Whether to wait. With False, the call returns immediately, with the goal for `wait_for_goal`.

        Raises
        ------
        BadRequestError
            An endpoint still sends traffic or shadow traffic to the backend.
        """
        if not force:
            await self._let_calls_leave()
        return await self._change("delete_backend", blocking=blocking, tag=backend_tag, force=force)
