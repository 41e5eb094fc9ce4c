"""The client's method for handles."""

from __future__ import annotations

from daskserve.client.instance.connection import Verbs
from daskserve.client.instance.known_handles import handles_of, open_router
from daskserve.data.caller.calls.handle import Handle
from daskserve.errors import NotFoundError


class HandleVerbs(Verbs):
    """The method of a `Client` that returns handles."""

    async def get_handle(self, endpoint_name: str, missing_ok: bool = False) -> Handle:
        """Return a handle that calls an endpoint from Python, the same one until the endpoint changes.

        Parameters
        ----------
        missing_ok : bool
            Whether the endpoint may be created later. An endpoint whose first deploy failed is always an
            error.

        Raises
        ------
        NotFoundError
            A `KeyError`: there is no such endpoint.
        """
        cluster_connection, instance = self._connection.cluster_connection, self._connection.instance
        self._connection.check_open()
        if cluster_connection.is_closed:
            raise cluster_connection.closed_error()
        cluster = cluster_connection.cluster(instance)
        handles = handles_of(cluster)
        known = handles.get(endpoint_name)
        if known is not None:
            return known
        try:
            facts = await self._call("get_endpoint", name=endpoint_name)
            exists = True
        except NotFoundError as error:
            if not missing_ok or error.reason:
                raise
            facts, exists = {"is_legacy": True, "python_methods": []}, False
        router = await self._run(open_router(cluster, endpoint_name, exists=exists))
        handle = Handle(
            instance,
            endpoint_name,
            is_legacy=facts["is_legacy"],
            python_methods=tuple(facts["python_methods"]),
            route=facts.get("route"),
            cluster=cluster,
        )
        handles.keep(handle, router, facts)
        return handle
