"""The functions of the classic system in ``import daskserve as serve``: its client's verbs, without a client.

Each is made from the verb of the client, in both forms, and uses the instance of `daskserve.run`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from daskserve.client.classic_handles import classic_handle
from daskserve.client.client import ClientVerbs
from daskserve.client.definitions.specs import join_user_config
from daskserve.client.functions.deployment import ClassicDeployment
from daskserve.client.functions.discovery import default_verbs, of_default
from daskserve.client.functions.forms import Form, awaitable, blocking
from daskserve.client.verbs.deployments import StoredDeployment
from daskserve.common.types import name_in, tag_part
from daskserve.data.caller.calls.handle import Handle
from daskserve.options.environment import Environment

P = ParamSpec("P")
T = TypeVar("T")


def both_forms(
    verb: Callable[Concatenate[ClientVerbs, P], Coroutine[Any, Any, T]],
) -> tuple[Callable[P, T], Callable[P, Coroutine[Any, Any, T]]]:
    """Return the blocking and the awaitable function of a client's verb."""
    body = of_default(verb)
    return blocking(body), awaitable(body)


create_backend, create_backend_async = both_forms(ClientVerbs.create_backend)
update_backend_config, update_backend_config_async = both_forms(ClientVerbs.update_backend_config)
get_backend_config, get_backend_config_async = both_forms(ClientVerbs.get_backend_config)
list_backends, list_backends_async = both_forms(ClientVerbs.list_backends)
delete_backend, delete_backend_async = both_forms(ClientVerbs.delete_backend)

create_endpoint, create_endpoint_async = both_forms(ClientVerbs.create_endpoint)
list_endpoints, list_endpoints_async = both_forms(ClientVerbs.list_endpoints)
set_traffic, set_traffic_async = both_forms(ClientVerbs.set_traffic)
shadow_traffic, shadow_traffic_async = both_forms(ClientVerbs.shadow_traffic)
delete_endpoint, delete_endpoint_async = both_forms(ClientVerbs.delete_endpoint)

get_deployment_info, get_deployment_info_async = both_forms(ClientVerbs.get_deployment_info)
delete_deployment, delete_deployment_async = both_forms(ClientVerbs.delete_deployment)
wait_for_goal, wait_for_goal_async = both_forms(ClientVerbs.wait_for_goal)

_plain_handle, get_handle_async = both_forms(ClientVerbs.get_handle)


def get_handle(endpoint_name: str, missing_ok: bool = False, sync: bool = True) -> Handle:
    """Return a handle that calls an endpoint from Python; see `daskserve.client.client.Client.get_handle`."""
    return classic_handle(_plain_handle(endpoint_name, missing_ok), sync)


async def _get_deployment(form: Form[Any], name: str) -> ClassicDeployment:
    """Return a deployment as it was deployed, with its callable and arguments, ready to be deployed again.

    The callable and the arguments are unpickled in this process on first use, which fails if they need
    modules that are not installed here.

    Raises
    ------
    NotFoundError
        A `KeyError`: there is no deployment of this name.
    NotRunningError
        No instance runs.
    """
    found = await (await default_verbs(form)).stored_deployments(tag_part(name))
    return _restored(found[tag_part(name)])


get_deployment = blocking(_get_deployment)
get_deployment_async = awaitable(_get_deployment)


async def _list_deployments(form: Form[Any]) -> dict[str, ClassicDeployment]:
    """Return every deployment by name, each as `get_deployment` returns it."""
    found = await (await default_verbs(form)).stored_deployments()
    return {name_in(tag): _restored(each) for tag, each in found.items()}


list_deployments = blocking(_list_deployments)
list_deployments_async = awaitable(_list_deployments)


def _restored(found: StoredDeployment) -> ClassicDeployment:
    spec = found.spec
    return ClassicDeployment.stored(
        found.code,
        route=found.route,
        name=name_in(spec.tag),
        config=join_user_config(spec.config, spec.user_config),
        actor_options=spec.actor_options,
        version=spec.user_version,
        env=None if spec.env is None else Environment.from_text(spec.env),
    )
