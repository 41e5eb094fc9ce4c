"""The public API of ``import daskserve as serve``, and the cost of the import."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import get_overloads

import pytest
from tables import each_case

import daskserve as serve
from daskserve.options.http import HTTPOptions

PUBLIC = {
    "Application",
    "AsyncClient",
    "Client",
    "Deployment",
    "HTTPOptions",
    "Handle",
    "RunTarget",
    "Status",
    "__version__",
    "autoscaling",
    "batch",
    "batching",
    "classic",
    "config",
    "connect",
    "connect_async",
    "context",
    "delete",
    "delete_async",
    "deployment",
    "errors",
    "events",
    "events_async",
    "explain",
    "explain_async",
    "get_app_handle",
    "get_app_handle_async",
    "get_deployment_actor",
    "get_deployment_actor_context",
    "get_deployment_handle",
    "get_deployment_handle_async",
    "get_model",
    "get_multiplexed_model_id",
    "get_replica_context",
    "get_trace_context",
    "handle",
    "history",
    "history_async",
    "ingress",
    "metrics",
    "multiplexed",
    "rollback",
    "rollback_async",
    "run",
    "run_async",
    "run_many",
    "run_many_async",
    "scale",
    "scale_async",
    "set_target_capacity",
    "set_target_capacity_async",
    "shutdown",
    "shutdown_async",
    "start",
    "start_async",
    "status",
    "status_async",
    "tasks",
}


def test_the_public_names_are_exactly_these() -> None:
    assert set(serve.__all__) == PUBLIC
    assert dir(serve) == sorted(PUBLIC)


@each_case("module", [serve, serve.classic, serve.tasks])
def test_type_checkers_and_the_site_find_every_public_name_where_it_is(module: ModuleType) -> None:
    """Type checkers and the site read the imports, but the names are loaded through a table."""
    tree = ast.parse(Path(str(module.__file__)).read_text())
    imports = [each for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)]
    found = {alias.asname or alias.name: each.module for each in imports for alias in each.names}
    for name in module.__all__:
        assert name in found, name
        place = importlib.import_module(str(found[name]))
        assert getattr(place, name) is getattr(module, name), name


@each_case(
    "function", [serve.batch, serve.batching.continuous_batch, serve.multiplexed, serve.tasks.task_handler]
)
def test_the_overloads_of_a_function_have_its_defaults(function: Callable[..., object]) -> None:
    """Editors and the site show the defaults of overloads, but those of the function apply."""
    overloads = get_overloads(function)
    assert overloads
    known = inspect.signature(function).parameters
    for each in overloads:
        for name, parameter in inspect.signature(each).parameters.items():
            if parameter.default is not parameter.empty:
                assert parameter.default == known[name].default, name


def test_every_public_name_exists_and_is_documented() -> None:
    for name in PUBLIC:
        value = getattr(serve, name)
        assert value is getattr(serve, name), name
        assert name == "__version__" or value.__doc__, name


def test_the_classic_names_are_in_a_module() -> None:
    assert {"create_backend", "set_traffic", "get_handle", "accept_batch", "CondaEnv", "ServeRequest"} <= set(
        serve.classic.__all__
    )


@each_case(
    ("module", "names"),
    [
        ("classic", " ".join(serve.classic.__all__)),
        ("autoscaling", "AutoscalingContext Decision"),
        ("batching", "ActiveRequest batch continuous_batch"),
        (
            "config",
            "ActorOptions AutoscalingConfig BackendConfig DeploymentActorConfig Environment HTTPOptions",
        ),
        ("config", "GangSchedulingConfig LoggingConfig TracingConfig"),
        ("context", "GangContext PlacementBundle PlacementGroup ReplicaContext ReplicaRank"),
        ("errors", "ServeError"),
        ("handle", "Handle Response ResponseGenerator resume_stream"),
        ("schema", "Explanation"),
        ("tasks", "InstanceAdapterConfig RedisAdapterConfig SQLiteAdapterConfig SourceItem TaskContext"),
        (
            "tasks",
            "TaskProcessorConfig TaskResult TaskSchedule get_task_context source task_api task_handler",
        ),
        ("tasks", "instantiate_adapter_from_config"),
    ],
)
def test_names_of_public_modules_keep_working_from_the_package(
    recwarn: pytest.WarningsRecorder, module: str, names: str
) -> None:
    for name in names.split():
        value = getattr(getattr(serve, module), name)
        assert value.__doc__
        assert getattr(serve, name) is value
    assert not recwarn.list


def test_the_decorator_of_task_consumers_keeps_working_from_the_package() -> None:
    """Python sets the name to the module ``daskserve.task_consumer`` once that is imported."""
    with pytest.raises(TypeError, match="task_processor_config"):
        serve.task_consumer()
    assert serve.task_consumer.task_consumer is serve.tasks.task_consumer


def test_ray_serves_modules_are_attributes() -> None:
    assert serve.config.AutoscalingConfig is serve.AutoscalingConfig
    assert [serve.exceptions.__name__, serve.handle.__name__, serve.schema.__name__] == [
        "daskserve.exceptions",
        "daskserve.handle",
        "daskserve.schema",
    ]


def test_an_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = serve.nonsense


@each_case(
    ("name", "text"),
    [
        (
            "get_world_size",
            "no attribute 'get_world_size'. That is Ray Serve's name: use serve.get_replica_context",
        ),
        ("get_replica_rank", r"use serve.get_replica_context\(\).rank."),
    ],
)
def test_a_name_of_ray_serve_raises_an_error_with_the_alternative(name: str, text: str) -> None:
    with pytest.raises(AttributeError, match=text):
        getattr(serve, name)
    assert not hasattr(serve, name)


@each_case(
    ("module", "name", "ours"),
    [
        ("config", "AutoscalingConfig", "AutoscalingConfig"),
        ("config", "GangSchedulingConfig", "GangSchedulingConfig"),
        ("exceptions", "RayServeException", "ServeError"),
        ("schema", "ServeStatus", "Status"),
        ("handle", "DeploymentHandle", "Handle"),
    ],
)
def test_the_modules_of_ray_serve_have_its_names(module: str, name: str, ours: str) -> None:
    assert getattr(getattr(serve, module), name) is getattr(serve, ours)


def test_the_places_of_proxies_have_ray_serves_names() -> None:
    places = serve.config.ProxyLocation
    assert HTTPOptions(location=places.Disabled) == HTTPOptions(location=places.NO_SERVER)
    assert (places.HeadOnly, places.EveryNode) == ("HeadOnly", "EveryNode")


@each_case(
    ("statement", "text"),
    [
        ("from daskserve import get_world_size", "from 'daskserve'. That is Ray Serve's name: use serve.get"),
        ("from daskserve.config import gRPCOptions", "from 'daskserve.config'.*there are no gRPC proxies"),
        ("from daskserve.exceptions import gRPCStatusError", "there are no gRPC proxies"),
        ("from daskserve.schema import ServeInstanceDetails", r"use serve.status\(\)"),
        ("from daskserve.handle import RayServeHandle", "use serve.Handle"),
        ("from daskserve.config import nonsense", "cannot import name 'nonsense' from 'daskserve.config'"),
    ],
)
def test_an_import_of_what_there_is_not_says_what_to_use(statement: str, text: str) -> None:
    with pytest.raises(ImportError, match=text):
        exec(statement)


def test_importing_loads_nothing_heavy_and_starts_nothing() -> None:
    code = (
        "import sys, threading, daskserve\n"
        "heavy = {'distributed', 'pydantic', 'starlette', 'tornado', 'cloudpickle', 'asyncio'}\n"
        "print(sorted(heavy & set(sys.modules)), threading.active_count())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split("\n")[0] == "[] 1"


def test_a_classic_name_loads_no_more_than_its_home() -> None:
    """A replica's process has no client, and loading one would delay its first request by a second."""
    code = (
        "import sys, daskserve as serve\n"
        "serve.get_current_replica_tag, serve.accept_batch, serve.ServeRequest\n"
        "serve.tasks.task_consumer, serve.task_consumer, serve.task_handler\n"
        "print('daskserve.client' in sys.modules, 'get_current_replica_tag' in vars(serve))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "False True\n"


def test_no_public_name_is_hidden_by_a_submodule() -> None:
    """Importing a submodule sets it as an attribute of the package and replaces an equal name."""
    code = (
        "import importlib, pkgutil, types, daskserve as serve\n"
        "for module in pkgutil.iter_modules(serve.__path__):\n"
        "    importlib.import_module(f'daskserve.{module.name}')\n"
        "hidden = [n for n in serve.__all__ if isinstance(getattr(serve, n), types.ModuleType)]\n"
        "print(hidden)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    modules = "autoscaling batching classic config context errors handle metrics tasks"
    assert done.stdout.strip() == str(modules.split())


def test_errors_say_whether_a_retry_may_help() -> None:
    errors = serve.errors
    for kind in (errors.BackPressureError, errors.UnavailableError, errors.ActorLostError):
        assert kind("full").is_retryable
    assert errors.RequestTimeoutError("late").is_retryable
    for kind in (errors.ServeError, errors.BadRequestError, errors.NotFoundError, errors.UserCodeError):
        assert not kind("wrong").is_retryable
