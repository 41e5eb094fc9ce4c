"""The options of `serve.deployment` are checked where they are written, also under Ray Serve's names."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import pytest
from tables import each_case

import daskserve as serve
from daskserve.client.definitions.specs import make_spec
from daskserve.client.functions.deployment import RAY_OPTIONS
from daskserve.client.functions.ray_options import check_ray_options
from daskserve.options.actor import ActorOptions, parse_actor_options
from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.options.backend import BackendConfig

#: The options of today's Ray Serve that a deployment takes, with a valid value.
OPTIONS: Mapping[str, Any] = {
    "name": "other",
    "num_replicas": "auto",
    "ray_actor_options": {"num_cpus": 1},
    "max_replicas_per_node": 3,
    "user_config": {"a": 1},
    "max_ongoing_requests": 7,
    "max_queued_requests": -1,
    "autoscaling_config": {"max_replicas": 3},
    "graceful_shutdown_wait_loop_s": 3,
    "graceful_shutdown_timeout_s": 30,
    "health_check_period_s": 20,
    "health_check_timeout_s": 40,
    "max_constructor_retry_count": 5,
    "rolling_update_percentage": 0.5,
    "max_surge_percent": 10,
}


class Model:
    def __call__(self) -> None: ...


#: The parameters of Ray Serve's functions, except ``*`` and ``**``.
RAY_DECORATOR = """
name version num_replicas ray_actor_options placement_group_bundles placement_group_strategy
placement_group_bundle_label_selector max_replicas_per_node user_config max_ongoing_requests
max_queued_requests backpressure_config autoscaling_config graceful_shutdown_wait_loop_s
graceful_shutdown_timeout_s health_check_period_s health_check_timeout_s logging_config
request_router_config max_constructor_retry_count gang_scheduling_config deployment_actors
rolling_update_percentage max_surge_percent
"""
RAY_START = "proxy_location http_options grpc_options logging_config tracing_config controller_options"


@each_case(
    ("function", "names"),
    [(serve.deployment, RAY_DECORATOR), (serve.start, RAY_START), (serve.start_async, RAY_START)],
)
def test_the_signatures_have_the_parameters_of_ray_serve(function: Any, names: str) -> None:
    assert set(names.split()) - set(inspect.signature(function).parameters) == set()


@each_case("name", RAY_OPTIONS)
def test_an_option_without_a_counterpart_is_none_or_refused(name: str) -> None:
    assert serve.deployment(**{name: None})(Model) == serve.deployment(Model)
    with pytest.raises(ValueError, match=f"no option '{name}'. That is Ray Serve's name"):
        serve.deployment(**{name: {"a": 1}})


def test_options_of_an_instance_that_cannot_matter_are_warned_of() -> None:
    check_ray_options("serve.start()", grpc_options=None, logging_config=None)
    with pytest.warns(UserWarning, match=r"controller_options of serve.start\(\) is Ray Serve's name"):
        check_ray_options("serve.start()", controller_options={"a": 1})
    with pytest.warns(UserWarning, match="no gRPC proxies"):
        check_ray_options("serve.start()", grpc_options={"port": 9000})
    for refused in ({"grpc_options": {"grpc_servicer_functions": ["a.b"]}}, {"grpc_options": 1}):
        with pytest.raises(TypeError, match=next(iter(refused))):
            check_ray_options("serve.start()", **refused)


@each_case("name", OPTIONS)
def test_an_option_is_accepted_in_the_decorator_and_by_options(name: str) -> None:
    options = {name: OPTIONS[name]}
    plain = serve.deployment(Model)
    made = serve.deployment(**options)(Model)
    assert made != plain
    assert plain.options(**options) == made
    assert plain == serve.deployment(Model)
    assert name in inspect.signature(serve.deployment).parameters


def test_the_signature_has_every_option_of_the_model() -> None:
    parameters = inspect.signature(serve.deployment).parameters
    for name, field in BackendConfig.model_fields.items():
        if name != "internal_metadata":
            assert parameters[name].default == field.get_default(call_default_factory=True)


@each_case(
    ("options", "match"),
    [
        ({"name": ""}, "name must not be empty"),
        ({"num_replicas": 0}, "num_replicas"),
        ({"num_replicas": 2, "autoscaling_config": {"max_replicas": 3}}, "cannot be combined with"),
        ({"max_ongoing_requests": 0}, "max_ongoing_requests"),
        ({"max_queued_requests": -2}, "max_queued_requests"),
        ({"max_queued_requests": 0}, "give a number from 1, or -1"),
        ({"max_replicas_per_node": 0}, "max_replicas_per_node"),
        ({"max_replicas_per_node": 101}, "max_replicas_per_node"),
        ({"max_constructor_retry_count": 0}, "max_constructor_retry_count"),
        ({"placement": "STRICT_SPREAD"}, "placement"),
        ({"rolling_update_percentage": 0}, "rolling_update_percentage is 0; give a share"),
        ({"rolling_update_percentage": 1.1}, "rolling_update_percentage is 1.1"),
        ({"rolling_update_percentage": True}, "rolling_update_percentage is True"),
        ({"rolling_update_percentage": 0.5, "max_unavailable": 1}, "another spelling of max_unavailable"),
        ({"max_surge_percent": 101}, "max_surge_percent is 101; give a percentage"),
        ({"max_surge_percent": "10%"}, "max_surge_percent is '10%'"),
        ({"max_unavailable": -1}, "max_unavailable"),
        ({"graceful_shutdown_timeout_s": -1}, "graceful_shutdown_timeout_s"),
        ({"health_check_period_s": 0}, "health_check_period_s"),
        ({"ray_actor_options": {"foo": 1}}, "ActorOptions has no option 'foo'"),
        ({"ray_actor_options": {"label_selector": {}}}, "Dask's workers have no labels"),
        ({"ray_actor_options": {}, "actor_options": {}}, "another spelling of actor_options"),
        ({"ray_actor_options": {"runtime_env": "a"}, "env": "b"}, "another spelling of env"),
        ({"env": "not/absolute"}, "absolute path"),
        (
            {"max_ongoing_requests": 2, "max_concurrent_queries": 2},
            "max_concurrent_queries is another spelling",
        ),
        ({"ray_actor_options": {"memory": "2 elephants"}}, "'2 elephants' is not an amount of bytes; give a"),
        ({"ray_actor_options": {"foo": None}}, "ActorOptions has no option 'foo'"),
        ({"no_such_option": 1}, "no option 'no_such_option'. The nearest are: "),
    ],
)
def test_a_bad_value_is_refused_where_it_is_written(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        serve.deployment(**options)(Model)
    with pytest.raises(ValueError, match=match):
        serve.deployment(Model).options(**options)


def auto(**options: Any) -> dict[str, Any]:
    return {"autoscaling_config": AutoscalingConfig(**options)}


BUNDLES = [{"CPU": 1}, {"CPU": 2}]
PAIRS = {"gang_size": 2}


@each_case(
    ("first", "then", "expected"),
    [
        ({"num_replicas": "auto"}, {"num_replicas": 2}, {"num_replicas": 2}),
        ({"autoscaling_config": {"max_replicas": 3}}, {"num_replicas": 2}, {"num_replicas": 2}),
        ({"num_replicas": 2}, {"num_replicas": "auto"}, auto(max_replicas=100)),
        ({"num_replicas": 2}, {"autoscaling_config": {"max_replicas": 3}}, auto(max_replicas=3)),
        ({"num_replicas": "auto"}, {"autoscaling_config": None}, {}),
        (
            {"autoscaling_config": {"max_replicas": 3, "dry_run": True}},
            {"num_replicas": 2},
            {"num_replicas": 2, **auto(max_replicas=3, dry_run=True)},
        ),
        ({"num_replicas": 3}, {"num_replicas": None}, {"num_replicas": 3}),
        ({"num_replicas": 3}, {"num_replicas": None, "autoscaling_config": {}}, auto()),
        ({"max_ongoing_requests": 3}, {"max_concurrent_queries": 4}, {"max_ongoing_requests": 4}),
        ({"max_unavailable": 1}, {"rolling_update_percentage": 0.2}, {"max_unavailable": "20%"}),
        ({"placement_group_bundles": BUNDLES}, {"placement_group_strategy": "SPREAD"}, None),
        ({"placement_group_strategy": "SPREAD"}, {"placement_group_bundles": BUNDLES}, None),
        ({"num_replicas": 4}, {"gang_scheduling_config": PAIRS}, None),
        ({"gang_scheduling_config": PAIRS}, {"num_replicas": 4}, None),
        ({"user_config": 1}, {"logging_config": None, "backpressure_config": None}, {"user_config": 1}),
    ],
)
def test_steps_are_merged_and_then_checked(
    first: dict[str, Any], then: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    whole = BackendConfig(**{**first, **then} if expected is None else expected)
    steps = serve.deployment(**first)(Model).options(**then)
    beside = serve.deployment(config=first, **then)(Model)
    for made in (steps, beside):
        made.bind()
        assert made.config == whole


@each_case(
    ("options", "match"),
    [
        (
            {"placement_group_strategy": "SPREAD"},
            "'SPREAD' is given without placement_group_bundles; give both",
        ),
        ({"gang_scheduling_config": PAIRS}, "num_replicas=1 must be a multiple of gang_size=2"),
    ],
)
def test_an_option_that_lacks_another_one_is_refused_when_it_is_used(
    options: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        serve.deployment(**options)(Model).bind()
    with pytest.raises(ValueError, match=match):
        make_spec("b", Model, (), {}, actor_options=None, config=options, timeout_s=None)


@each_case(("text", "count"), [("2GB", 2 * 10**9), ("512 MiB", 2**29), ("1.5kB", 1500), (7, 7), (None, 0)])
def test_amounts_of_bytes_are_numbers_or_texts(text: Any, count: int) -> None:
    made = serve.deployment(ray_actor_options={"memory": text, "num_gpus": None, "runtime_env": None})(Model)
    assert made.actor_options == ActorOptions(memory=count)
    if text is not None:
        bundles = [{"CPU": 1, "memory": text}]
        config = BackendConfig(max_body_bytes=text, placement_group_bundles=bundles)  # type: ignore[arg-type]
        assert (config.max_body_bytes, config.placement_group_bundles) == (
            count,
            [{"CPU": 1, "memory": count}],
        )


def test_options_of_another_type_are_refused() -> None:
    with pytest.raises(TypeError, match="ray_actor_options must be a ActorOptions or a dict"):
        serve.deployment(ray_actor_options=[1])  # type: ignore[call-overload]


@each_case(
    "options",
    [
        "num_cpus",
        {"num_cpus": "two"},
        {"num_cpus": "2"},
        {"num_gpus": True},
        {"num_gpus": [1]},
        {"memory": "much"},
        {"memory": {}},
        {"resources": ["TPU"]},
        {"resources": {"TPU": "1"}},
        {"resources": {1: 1}},
        {"accelerator_type": 100},
        {"workers": "one"},
        {"runtime_env": 3},
        {"runtime_env": {"env_vars": 3}},
    ],
)
def test_a_wrong_type_in_the_actor_options_is_a_type_error(options: Any) -> None:
    with pytest.raises(TypeError):
        serve.deployment(ray_actor_options=options)(Model)
    with pytest.raises(TypeError):
        serve.deployment(Model).options(ray_actor_options=options)
    if "runtime_env" not in options:
        with pytest.raises(TypeError):
            make_spec("b", Model, (), {}, actor_options=options, config=None, timeout_s=None)


def test_a_value_that_is_not_allowed_in_the_actor_options_is_a_value_error() -> None:
    for options in ({"num_cpus": -1}, {"nim_cpus": 1}, {"resources": {"TPU": -1}}):
        with pytest.raises(ValueError, match="validation error") as caught:
            serve.deployment(ray_actor_options=options)(Model)
        assert not isinstance(caught.value, TypeError)


def test_the_environment_of_ray_actor_options_is_the_environment() -> None:
    runtime_env = {"pip": ["torch"], "env_vars": {"A": "1"}}
    made = serve.deployment(ray_actor_options={"runtime_env": runtime_env, "num_gpus": 1})(Model)
    assert (made.env, made.actor_options) == (runtime_env, ActorOptions(num_gpus=1))
    assert made.options(num_replicas=2).env == runtime_env
    assert made.options(env=None).env is None
    assert parse_actor_options(None, {"runtime_env": {}}, "torch")[1] == "torch"


def test_a_type_of_accelerator_is_a_resource_that_many_replicas_share() -> None:
    demand = ActorOptions(num_cpus=0, accelerator_type="A100").demand()
    assert demand.keys() == {"accelerator_type:A100"}
    assert 0 < demand["accelerator_type:A100"] <= 0.01


def test_the_classic_name_of_max_ongoing_requests_can_be_read_and_set() -> None:
    config = BackendConfig(max_concurrent_queries=3)
    assert (config.max_ongoing_requests, config.to_plain()) == (3, {"max_ongoing_requests": 3})
    config.max_concurrent_queries = 4
    assert config.max_ongoing_requests == config.max_concurrent_queries == 4
    with pytest.raises(ValueError, match="max_ongoing_requests"):
        config.max_concurrent_queries = 0


@each_case("value", [5, "CPU", [("num_cpus", 1)]])
def test_actor_options_that_are_no_mapping_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="valid dictionary or instance of ActorOptions"):
        ActorOptions.model_validate(value)
    assert ActorOptions.model_validate(known := ActorOptions(num_cpus=2)) is known
