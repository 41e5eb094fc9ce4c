"""Restores an application that this program has replaced."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from daskserve.client.verbs.applications import ApplicationVerbs, BuiltApplication
from daskserve.common import settings
from daskserve.common.types import BackendTag
from daskserve.errors import AlreadyRegisteredError
from daskserve.options.specs import ApplicationSpec
from daskserve.payload.parcels import Parcel


async def copy_application(verbs: ApplicationVerbs, name: str) -> ApplicationSpec:
    """Return a copy of an application with its code; raise `NotFoundError` if there is none.

    The copy is kept in this program, so the controller need not keep the code of the old version.
    """
    found = await verbs._call("stored_application", name=name)
    spec = ApplicationSpec.from_plain(found["spec"])
    codes: Mapping[BackendTag, str] = found["codes"]
    cluster = verbs._connection.cluster_connection.cluster(verbs._connection.instance)
    deployments = []
    for each in spec.deployments:
        parcel = Parcel.labelled(each.spec.code)
        parts: tuple[Any, ...] = ()
        if parcel is not None:
            # Fetched now, because large constructor arguments are deleted together with their version.
            parts = tuple(await verbs._run(cluster.fetch_parcel(codes[each.spec.tag], parcel)))
        deployments.append(replace(each, spec=replace(each.spec, parts=parts)))
    return replace(spec, deployments=tuple(deployments))


async def restore_application(verbs: ApplicationVerbs, copy: ApplicationSpec, replaced_by: str) -> None:
    """Deploy a copy of an application, unless another program has changed the application since.

    Raises
    ------
    DeployError The old version no longer starts; the newer one keeps running.
    """
    spec = replace(
        copy,
        deployments=tuple(
            replace(each, spec=replace(each.spec, request_id=uuid.uuid4().hex)) for each in copy.deployments
        ),
        request_id=uuid.uuid4().hex,
        progress_timeout_s=settings.timeouts().change_s,
    )
    with suppress(AlreadyRegisteredError):
        await verbs._deploy_built([BuiltApplication(spec, {})], expected={spec.name: replaced_by})
