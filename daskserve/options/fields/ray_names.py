"""Names of Ray Serve: other spellings of options, and replacements of names that daskserve lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from daskserve.internals.python import is_from_import

#: Names of Ray Serve's options that have no counterpart of the same meaning, with a replacement.
INSTEAD: Mapping[str, str] = {
    "ray_actor_options": "pass actor_options={...} beside the config",
    "runtime_env": "pass env=... beside the config",
    "route_prefix": "pass route_prefix=... to serve.run() or client.deploy()",
    "init_args": "pass the arguments to .bind() or client.deploy()",
    "init_kwargs": "pass the arguments to .bind() or client.deploy()",
    "batch_wait_timeout_s": "use 'batch_wait_timeout' here; @serve.batch keeps the name",
    "proxy_location": "use 'location' of http_options",
    "label_selector": "Dask's workers have no labels; declare a resource on such workers and use "
    "'resources', or name them with 'workers'",
    "fallback_strategy": "Dask's workers have no labels; list all suitable workers in 'workers'",
    "object_store_memory": "Dask has no object store; use 'memory'",
    "placement_group_bundle_label_selector": "Dask's workers have no labels; declare a resource on such "
    "workers, and ask for it in 'placement_group_bundles'",
    "placement_group_fallback_strategy": "Dask's workers have no labels; list all suitable workers in "
    "'workers' of actor_options",
    "grpc_options": "there are no gRPC proxies; use HTTP, or handles from Python",
    "controller_options": "the controller runs in one of Dask's workers; leave it out",
    "dedicated_cpu": "the proxies run in Dask's workers; choose them with 'location' of http_options",
    "backpressure_config": "a full queue answers 503 with Retry-After; leave it out",
}
_DETAILS = "GET /api/serve/applications/ of the scheduler's HTTP server has it as JSON"
_SCALING = "use client.explain(), or `daskserve explain`"
_NO_GRPC = "there are no gRPC proxies; use HTTP, or handles from Python"

#: Names of Ray Serve's modules that daskserve does not have, with replacements.
OTHER_NAMES: Mapping[str, str] = {
    "get_replica_rank": "use serve.get_replica_context().rank",
    "get_world_size": "use serve.get_replica_context().world_size",
    "DeploymentHandle": "use serve.Handle, or daskserve.handle.DeploymentHandle",
    "DeploymentResponse": "use daskserve.handle.DeploymentResponse",
    "DeploymentResponseGenerator": "use serve.handle.ResponseGenerator",
    "RayServeHandle": "use serve.Handle",
    "RayServeSyncHandle": "use serve.Handle",
    "RayServeException": "use serve.errors.ServeError",
    "build": "`daskserve build module:app` writes the configuration file of an application",
    "init": "use serve.start()",
    "llm": "daskserve.openai.build_app serves models in OpenAI's form, by engines of your choice",
    "grpc_util": "there are no gRPC proxies; use HTTP, or handles from Python",
    "drivers": "write a class that calls the other deployments by handle",
    "gradio_integrations": "serve the application that gradio.mount_gradio_app returns",
    "gRPCOptions": "there are no gRPC proxies; use HTTP, or handles from Python",
    "gRPCStatusError": "there are no gRPC proxies; use HTTP, or handles from Python",
    "BackpressureConfig": "a full queue answers 503 with Retry-After; leave it out",
    "ControllerOptions": "the controller runs in one of Dask's workers; leave it out",
    "AutoscalingPolicy": "give the function, or its import path, as 'policy' of autoscaling_config",
    "GangPlacementStrategy": "write 'PACK' or 'SPREAD'",
    "GangRuntimeFailurePolicy": "write 'RESTART_GANG'",
    "ApplicationStatus": "a status is text, such as 'RUNNING'; see serve.status()",
    "DeploymentStatus": "a status is text, such as 'HEALTHY'; see serve.status()",
    "ProxyStatus": "a status is text, such as 'HEALTHY'; see serve.status().proxies",
    "ReplicaState": "a state is text, such as 'RUNNING'; see serve.status()",
    "ServeInstanceDetails": "use serve.status()",
    "ServeActorDetails": _DETAILS,
    "ApplicationDetails": "use serve.status().applications",
    "DeploymentDetails": "use serve.status().applications[...].deployments",
    "ReplicaDetails": _DETAILS,
    "ReplicaRank": "use serve.get_replica_context().rank",
    "ProxyDetails": "use serve.status().proxies",
    "Target": _DETAILS,
    "TargetGroup": _DETAILS,
    "DeploymentTopology": _DETAILS,
    "DeploymentNode": _DETAILS,
    "DeploymentAutoscalingDetail": _SCALING,
    "ScalingDecision": _SCALING,
    "AutoscalingStatus": _SCALING,
    "AutoscalingMetricsHealth": _SCALING,
    "ControllerHealthMetrics": "use `daskserve controller-health`, or the metrics for Prometheus",
    "DurationStats": "use the metrics for Prometheus",
    "ScaleDeploymentRequest": "send a dict as JSON, or use client.scale_deployment()",
    "APIType": "write 'declarative' or 'imperative'",
    "EncodingType": "write 'JSON' or 'TEXT'",
    "HTTPOptionsSchema": "use serve.HTTPOptions",
    "gRPCOptionsSchema": _NO_GRPC,
    "AggregationFunction": "write 'mean', 'max' or 'min' as 'aggregation_function' of autoscaling_config",
    "DeploymentID": "the keys that a policy gets have a name and an app_name; leave the annotation out",
    "gang": "use serve.context.GangContext",
    "dag": "give the bound deployments to .bind() of the ingress",
    "RayActorOptionsSchema": "use serve.config.ActorOptions",
}


def missing_name(module: str, name: str) -> Exception:
    """Return the error for a name that a module does not have; call it in the module's ``__getattr__``.

    ``from module import name`` hides the text of an `AttributeError`, so in that case the error is an
    `ImportError`.
    """
    if name not in OTHER_NAMES:
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    hint = f"That is Ray Serve's name: {OTHER_NAMES[name]}."
    if is_from_import(2):
        return ImportError(f"cannot import name {name!r} from {module!r}. {hint}", name=module)
    return AttributeError(f"module {module!r} has no attribute {name!r}. {hint}")


def translated(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a backend, with Ray Serve's options translated to daskserve's.

    Raises
    ------
    ValueError
        A value that Ray Serve does not allow.
    """
    # Programs pass None for options that they do not use.
    found = {name: value for name, value in values.items() if value is not None or name not in INSTEAD}
    for theirs, (ours, translate) in _TRANSLATIONS.items():
        if theirs in found:
            found[ours] = translate(found.pop(theirs))
    return found


def _update_share(value: Any) -> str:
    if not _is_number(value) or not 0 < value <= 1:
        raise ValueError(
            f"rolling_update_percentage is {value!r}; give a share above 0 and up to 1, or use "
            "max_unavailable, which is a number of replicas or a percentage"
        )
    return _percentage(100 * value)


def _surge_percentage(value: Any) -> str:
    if not _is_number(value) or not 0 <= value <= 100:
        raise ValueError(
            f"max_surge_percent is {value!r}; give a percentage from 0 to 100, or use max_surge, which is a "
            "number of replicas or a percentage"
        )
    return _percentage(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _percentage(value: float) -> str:
    # Written with nine decimals, so that a third of three replicas is one, and not slightly less, which would
    # round down to zero.
    return f"{value:.9f}".rstrip("0").rstrip(".") + "%"


#: Ray Serve's name -> daskserve's name, and the function that translates the value.
_TRANSLATIONS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "rolling_update_percentage": ("max_unavailable", _update_share),
    "max_surge_percent": ("max_surge", _surge_percentage),
}
#: The names that `translated` understands, each with daskserve's name.
TRANSLATED: Mapping[str, str] = {theirs: ours for theirs, (ours, _) in _TRANSLATIONS.items()}
