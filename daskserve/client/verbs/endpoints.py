"""The client's methods for endpoints."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from daskserve.client.definitions.specs import check_endpoint_name, check_endpoint_route, check_methods
from daskserve.client.instance.connection import Verbs
from daskserve.errors import BadRequestError


class EndpointVerbs(Verbs):
    """Methods of a `Client` that manage endpoints and their traffic."""

    async def create_endpoint(
        self,
        endpoint_name: str,
        *,
        backend: str | None = None,
        route: str | None = None,
        methods: Sequence[str] = ("GET",),
    ) -> None:
        """Register an endpoint whose traffic goes to one backend; every proxy serves it when this returns.

        Parameters
        ----------
        route : str, optional
            Path prefix of the endpoint, which may have variables, such as ``/users/{id:int}``; None makes it
            reachable by handle only.
        methods : list of str
            The HTTP methods it accepts; requests with other methods get 405.

        Raises
        ------
        TypeError, BadRequestError
            An argument has the wrong type, the route is reserved or not valid, or a method does not exist.
        AlreadyRegisteredError, NotRegisteredError
            The name or route is taken; the backend does not exist.
        """
        check_endpoint_name(endpoint_name, "endpoint_name")
        if not isinstance(backend, str):
            raise TypeError(f"backend must be the tag of a registered backend, got {backend!r}")
        check_endpoint_route(route)
        check_methods(methods)
        await self._change(
            "create_endpoint",
            name=endpoint_name,
            route=route,
            methods=list(methods),
            backend=backend,
            request_id=uuid.uuid4().hex,
        )

    async def delete_endpoint(self, endpoint: str) -> None:
        """Remove an endpoint but not its backends; do nothing if the name is unknown.

        Raises
        ------
        BadRequestError
            The endpoint belongs to an application.
        """
        await self._let_calls_leave()
        await self._change("delete_endpoint", name=endpoint)

    async def list_endpoints(self) -> dict[str, dict[str, Any]]:
        """Return ``{name: {"route", "methods", "traffic", "shadows", "python_methods"}}``."""
        return {
            name: {
                "route": facts["route"],
                "methods": list(facts["methods"]),
                "traffic": dict(facts["traffic"]),
                "shadows": dict(facts["shadows"]),
                "python_methods": list(facts["python_methods"]),
            }
            for name, facts in (await self._call("list_endpoints")).items()
        }

    async def set_traffic(self, endpoint_name: str, traffic_policy_dictionary: Mapping[str, float]) -> None:
        """Split an endpoint's traffic between backends, by weights in 0..1 that sum to 1.

        Raises
        ------
        BadRequestError
            A `ValueError`: the weights are invalid or not a dict, or the endpoint or a backend does not
            exist.
        """
        if not isinstance(traffic_policy_dictionary, Mapping):
            raise BadRequestError(
                f"Traffic must be a dict of backend tags and weights, got {traffic_policy_dictionary!r}"
            )
        await self._change("set_traffic", name=endpoint_name, traffic=dict(traffic_policy_dictionary))

    async def shadow_traffic(self, endpoint_name: str, backend_tag: str, proportion: float) -> None:
        """Send copies of a proportion of an endpoint's requests to a backend and drop its responses.

        A proportion of 0 stops this.

        Raises
        ------
        TypeError
            The proportion is not a number in 0..1.
        """
        is_number = isinstance(proportion, (int, float)) and not isinstance(proportion, bool)
        if not is_number or not 0 <= proportion <= 1:
            raise TypeError(f"proportion must be a number in 0..1, got {proportion!r}")
        await self._change(
            "shadow_traffic",
            name=endpoint_name,
            backend=backend_tag,
            proportion=float(proportion),
        )
