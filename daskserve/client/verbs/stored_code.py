"""The code of a deployment as its instance keeps it, for a program that deploys it again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from daskserve.client.instance.calls import run_on
from daskserve.client.instance.connection import InstanceConnection
from daskserve.data.replica.environment.working_dir import PackedFolder
from daskserve.errors import BadRequestError, BlockingCallError, CodeLoadError, InstanceError, NotFoundError
from daskserve.payload.parcels import Parcel, unpack_code

#: The keys of the result of `StoredCode.load`: the fields of
#: `daskserve.client.functions.deployment.ClassicDeployment` that hold user code.
CODE_FIELDS = ("definition", "init_args", "init_kwargs", "files")


@dataclass(frozen=True, slots=True)
class StoredCode:
    """The pickled code of a deployment, or the label of the parcel with the code.

    Attributes
    ----------
    code_name : str
        The controller's name of the code.
    """

    deployment: str
    code: bytes
    code_name: str
    connection: InstanceConnection

    async def load(self, *, asynchronous: bool) -> dict[str, Any]:
        """Return the values of `CODE_FIELDS`, unpickled in this process.

        Raises
        ------
        BadRequestError
            It cannot be unpickled here.
        NotFoundError The store has lost the code; or the code is large, and the instance that held the only
        copy has lost it.
        """
        if not self.code:
            raise NotFoundError(
                f"The code of deployment '{self.deployment}' is lost or damaged in its instance's "
                "store. Deploy it again from its source."
            )
        parcel = Parcel.labelled(self.code)
        parts = () if parcel is None else await self._fetch(parcel, asynchronous=asynchronous)
        try:
            *before, definition, args, kwargs = unpack_code(self.code, parts)
        except Exception as error:
            # A foreign object may raise anything when it is unpickled.
            raise BadRequestError(
                f"The code of deployment '{self.deployment}' cannot be unpickled in this process: "
                f"{type(error).__name__}: {error}. Install or import what it needs in this process, or "
                "replace it with .options(func_or_class=..., init_args=..., init_kwargs=...), and env=... if "
                "it has one."
            ) from error
        files = next((each for each in before if isinstance(each, PackedFolder)), None)
        values = (definition, tuple(args), dict(kwargs), files)
        return dict(zip(CODE_FIELDS, values, strict=True))

    async def _fetch(self, parcel: Parcel, *, asynchronous: bool) -> Any:
        cluster_connection = self.connection.cluster_connection
        if not asynchronous and cluster_connection.runs_here():
            raise BlockingCallError(
                f"The code of deployment '{self.deployment}' is large and not yet fetched, and fetching it "
                "here would block the event loop; use `await deployment.deploy_async(...)`, or do this in "
                "another thread (asyncio.to_thread)."
            )
        fetching = cluster_connection.cluster(self.connection.instance).fetch_parcel(self.code_name, parcel)
        try:
            return await run_on(cluster_connection, fetching, asynchronous=asynchronous)
        except (KeyError, CodeLoadError, InstanceError) as error:
            raise NotFoundError(
                f"The code of deployment '{self.deployment}' is no longer stored: the deployment has "
                "been deleted or changed. Call serve.get_deployment() again."
            ) from error
