"""An application as it ran before this program replaced it, to give it back."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from daskserve.client.verbs.applications import ApplicationVerbs, BuiltApplication
from daskserve.common import settings
from daskserve.common.types import BackendTag
from daskserve.errors import AlreadyRegisteredError
from daskserve.options.specs import ApplicationSpec
from daskserve.payload.parcels import Parcel


@dataclass(frozen=True)
class KeptApplication:
    """A copy of an application with its code, in this program's memory.

    The controller does not keep it: it would have to keep the code of the old version for as long.
    """

    spec: ApplicationSpec

    async def restore(self, verbs: ApplicationVerbs, replaced_by: str) -> bool:
        """Deploy the copy, if the application is still as a call of this program has deployed it.

        Raises
        ------
        DeployError
            The old version does not start any more; the newer one keeps running.
        """
        deployments = tuple(
            replace(each, spec=replace(each.spec, request_id=uuid.uuid4().hex))
            for each in self.spec.deployments
        )
        spec = replace(
            self.spec,
            deployments=deployments,
            request_id=uuid.uuid4().hex,
            progress_timeout_s=settings.timeouts().change_s,
        )
        try:
            await verbs._deploy_built([BuiltApplication(spec, {})], expected={spec.name: replaced_by})
        except AlreadyRegisteredError:
            return False
        return True


async def kept_application(verbs: ApplicationVerbs, name: str) -> KeptApplication:
    """Return a copy of an application; raise `NotFoundError` if there is none."""
    found = await verbs._call("stored_application", name=name)
    spec = ApplicationSpec.from_plain(found["spec"])
    codes: Mapping[BackendTag, str] = found["codes"]
    cluster = verbs._connection.cluster_connection.cluster(verbs._connection.instance)
    deployments = []
    for each in spec.deployments:
        parcel = Parcel.labelled(each.spec.code)
        parts: tuple[Any, ...] = ()
        if parcel is not None:
            # Large constructor arguments are deleted together with the version that they belong to.
            parts = tuple(await verbs._run(cluster.fetch_parcel(codes[each.spec.tag], parcel)))
        deployments.append(replace(each, spec=replace(each.spec, parts=parts)))
    return KeptApplication(replace(spec, deployments=tuple(deployments)))
