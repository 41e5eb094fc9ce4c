"""Keys of Ray Serve's files without a counterpart: some are ignored with a warning, others are errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from daskserve.options.fields.ray_names import INSTEAD


def _is_empty(value: Any) -> bool:
    return value is None or value in ({}, [], "", False)


def _always(value: Any) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class RayKey:
    """A key of Ray Serve's files that daskserve does not read.

    Attributes
    ----------
    text : str
        The replacement.
    is_harmless : callable
        Whether a value has no effect.
    """

    text: str
    is_harmless: Callable[[Any], bool] = _is_empty


def _instead(name: str, is_harmless: Callable[[Any], bool] = _is_empty) -> RayKey:
    return RayKey(INSTEAD[name], is_harmless)


def _has_no_services(value: Any) -> bool:
    return _is_empty(value) or (isinstance(value, Mapping) and not value.get("grpc_servicer_functions"))


_ONE_ADDRESS = RayKey("all applications of an instance have one address, which is in http_options")
_ONE_TRACING = RayKey("traces are those of the whole instance; write it at the top of the file", _always)

INSTANCE: Mapping[str, RayKey] = {
    "grpc_options": _instead("grpc_options", _has_no_services),
    "controller_options": _instead("controller_options", _always),
    "host": RayKey("write it in http_options"),
    "port": RayKey("write it in http_options"),
    # Keys of Anyscale's services, whose files extend those of Ray Serve.
    "name": RayKey("an instance has no name; its applications have", _always),
    "compute_config": RayKey("the applications run on the workers of the Dask cluster", _always),
    "excludes": RayKey("the whole folder is sent", _always),
    "image_uri": RayKey("start the workers in that image"),
    "working_dir": RayKey("write it in env of the applications"),
    "requirements": RayKey("write them as packages in env of the applications"),
}
HTTP: Mapping[str, RayKey] = {
    "num_cpus": RayKey("the proxies run in Dask's workers, and take no share of them", _always),
    "dedicated_cpu": _instead("dedicated_cpu", _always),
    "ssl_ca_certs": RayKey("the proxies do not ask for certificates of clients; let a reverse proxy do that"),
    "middlewares": RayKey("they are Python objects; name a function that returns them in proxy_callback"),
}
APPLICATION: Mapping[str, RayKey] = {
    "host": _ONE_ADDRESS,
    "port": _ONE_ADDRESS,
    "tracing_config": _ONE_TRACING,
}
DEPLOYMENT: Mapping[str, RayKey] = {
    "tracing_config": _ONE_TRACING,
    "backpressure_config": _instead("backpressure_config"),
    "placement_group_bundle_label_selector": _instead("placement_group_bundle_label_selector"),
    "placement_group_fallback_strategy": _instead("placement_group_fallback_strategy"),
    # Ray Serve does not read it here either.
    "route_prefix": RayKey("the application has the route", _always),
    "init_args": RayKey("the code binds them; let a function build the application from its args"),
    "init_kwargs": RayKey("the code binds them; let a function build the application from its args"),
    "is_driver_deployment": RayKey("there are no driver deployments"),
}
ACTOR: Mapping[str, RayKey] = {
    "object_store_memory": _instead("object_store_memory", _always),
    "label_selector": _instead("label_selector"),
    "fallback_strategy": _instead("fallback_strategy"),
}
ENVIRONMENT: Mapping[str, RayKey] = {
    "config": RayKey("how long an environment may take is start_timeout_s of the deployment", _always),
    "excludes": RayKey("the whole folder is sent", _always),
    "py_modules": RayKey("put the modules into the folder of working_dir"),
    "java_jars": RayKey("there is only Python"),
    "container": RayKey("run workers in that container, and name them with 'workers' of actor_options"),
    "image_uri": RayKey("run workers in that image, and name them with 'workers' of actor_options"),
    "py_executable": RayKey("name the environment's folder in 'python'"),
    "nsight": RayKey("start the workers under the profiler", _always),
    "rocprof_sys": RayKey("start the workers under the profiler", _always),
    "mpi": RayKey("there is no MPI"),
    "worker_process_setup_hook": RayKey("call it in the module of the application"),
}
