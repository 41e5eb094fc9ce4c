"""The client's methods for configurations, which declare applications in files."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from daskserve.client.instance.connection import Verbs
from daskserve.client.views.plan import Plan
from daskserve.config_file.model import InstanceConfig
from daskserve.errors import RequestTimeoutError
from daskserve.options.fields.bounds import checked_number

#: Time limit of one call that waits for a configuration, in seconds.
ROUND_S = 10.0


class DeclaringVerbs(Verbs):
    """Methods of a `Client` that deploy configurations and show them."""

    async def deploy_config(
        self,
        config: InstanceConfig,
        *,
        merge: bool = False,
        expected_version: int | None = None,
        source: str = "",
        version: str = "",
    ) -> int:
        """Deploy a configuration, and return its number as soon as the instance has accepted it.

        Workers import the applications and deploy them afterwards; `wait_for_config` waits for that. An
        application that cannot be built keeps its previous version. Applications that an earlier
        configuration deployed and this one does not name are deleted.

        Parameters
        ----------
        config : InstanceConfig
            The result of `daskserve.config_file.reading.read` for a file.
        merge : bool
            Whether to keep everything that the configuration does not name.
        expected_version : int, optional
            The number of the configuration that this one is based on; see `get_config`.
        source, version : str
            The name of the file and its version, such as a Git commit, for the history.

        Raises
        ------
        VersionConflictError
            There is a newer configuration than ``expected_version``.
        BadRequestError
            A name occurs twice, or a route is already in use.
        """
        await self._share()
        answer = await self._submit(
            "apply_config",
            config=config.to_plain(),
            merge=merge,
            expected_version=expected_version,
            source=source,
            version=version,
            request_id=uuid.uuid4().hex,
        )
        return int(answer["version"])

    async def plan_config(self, config: InstanceConfig, *, merge: bool = False) -> Plan:
        """Return what `deploy_config` would change, for printing. Workers build the applications for this."""
        return Plan.of(await self._call("plan_config", config=config.to_plain(), merge=merge))

    async def get_config(self, application: str | None = None) -> dict[str, Any]:
        """Return the declared configuration of all applications or of one.

        References to variables and secrets are as they are in the file.

        Raises
        ------
        NotFoundError
            There is no such application, or a program has deployed it.
        """
        return dict(await self._call("get_config", name=application))

    async def wait_for_config(
        self,
        version: int,
        *,
        names: Sequence[str] | None = None,
        timeout_s: float | None = None,
        on_wait: Callable[[Mapping[str, str]], None] | None = None,
    ) -> dict[str, Mapping[str, str]]:
        """Return the ``status`` and ``message`` of a configuration's applications once none is in progress.

        Parameters
        ----------
        version : int
            The result of `deploy_config`.
        names : sequence of str, optional
            Default: all applications that it has declared.
        on_wait : function, optional
            It is called every ten seconds with the reason why each unfinished application waits, by name.

        Raises
        ------
        RequestTimeoutError
            A `TimeoutError`: it took longer than ``timeout_s``. The deploy continues.
        """
        clock = self._connection.cluster_connection.clock
        deadline = None if timeout_s is None else clock.now() + timeout_s
        while True:
            left_s = ROUND_S if deadline is None else max(0.0, min(ROUND_S, deadline - clock.now()))
            found = await self._call_until(
                deadline, "wait_for_config", version=version, names=names, timeout_s=left_s
            )
            if found is None:
                raise RequestTimeoutError(
                    f"The configuration is not deployed after {timeout_s} s: the controller, or a proxy that "
                    "it asked, did not answer. The deploy continues."
                )
            if found["is_done"]:
                await self._run(self._connection.calls.wait_until_applied(found.get("snapshot"), deadline))
                return dict(found["applications"])
            waiting = {
                name: each["message"] or each["status"]
                for name, each in found["applications"].items()
                if each["status"] in ("BUILDING", "DEPLOYING")
            }
            if deadline is not None and clock.now() >= deadline:
                text = "; ".join(f"{name}: {why}" for name, why in waiting.items())
                raise RequestTimeoutError(f"The configuration is not deployed after {timeout_s} s: {text}")
            if on_wait is not None:
                on_wait(waiting)

    async def scale_deployment(self, application: str, deployment: str | None, number: int) -> int:
        """Set the number of replicas of a deployment, until it is deployed with other options.

        Parameters
        ----------
        deployment : str or None
            None: the application's ingress.

        Raises
        ------
        NotFoundError
            There is no such application or deployment.
        BadRequestError
            The number is less than 1, or the deployment is autoscaled.
        """
        number = checked_number(number)
        return int(await self._submit("scale", application=application, name=deployment or "", number=number))

    async def restart(
        self, application: str, deployment: str | None = None, *, blocking: bool = True
    ) -> None:
        """Replace the replicas of an application, or of one of its deployments; the code stays the same.

        They are replaced as in an update, so that no request is lost.

        Raises
        ------
        NotFoundError
            There is no such application or deployment.
        """
        answer = await self._submit(
            "restart", application=application, deployment=deployment, request_id=uuid.uuid4().hex
        )
        goal = answer["goal"]
        if blocking and goal is not None:
            await self._run(self._connection.calls.wait_until_reached(goal, None))
