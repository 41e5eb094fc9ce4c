"""Options that are refused, such as unknown ones and those under two names: the error says what to write."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from tables import each_case

import daskserve as serve
from daskserve.options.actor import ActorOptions
from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.options.backend import BackendConfig
from daskserve.options.environment import Environment
from daskserve.options.fields.base import Options, parse_options
from daskserve.options.http import HTTPOptions
from daskserve.options.logging import LoggingConfig
from daskserve.options.placement import GangSchedulingConfig
from daskserve.options.queues import queue_options_of
from daskserve.options.rollout import percent_of
from daskserve.options.routing.priorities import PriorityConfig
from daskserve.options.routing.request_router import RequestRouterConfig
from daskserve.options.tracing import TracingConfig
from daskserve.request_router import RequestRouter


def message_of(model: type[Options], **options: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        model(**options)
    return str(caught.value)


def test_the_three_nearest_options_are_listed() -> None:
    message = message_of(BackendConfig, max_ongoing_request=1)
    assert "The nearest are: max_ongoing_requests, max_queued_requests, max_concurrent_queries;" in message
    assert "BackendConfig.model_fields has all" in message
    assert len(message) < 400
    listed = message_of(ActorOptions, zzz=1).partition("The nearest are: ")[2].partition(";")[0].split(", ")
    assert len(listed) == 3
    assert set(listed) <= ActorOptions.model_fields.keys()


@each_case(
    ("model", "options", "text"),
    [
        (
            BackendConfig,
            {"max_ongoing_requests": 3, "max_concurrent_queries": 4},
            "max_concurrent_queries is another spelling of max_ongoing_requests; give only one of them",
        ),
        (
            BackendConfig,
            {"graceful_shutdown_timeout_s": 1, "experimental_graceful_shutdown_timeout_s": 1},
            "graceful_shutdown_timeout_s is another spelling of experimental_graceful_shutdown_timeout_s",
        ),
        (Environment, {"uv": ["a"], "pip": ["a"]}, "uv is another spelling of pip; give only one of them"),
        (
            BackendConfig,
            {"max_surge_percent": 3, "max_surge": 1},
            "max_surge_percent is another spelling of max_surge;",
        ),
        (
            BackendConfig,
            {
                "autoscaling_config": {
                    "target_ongoing_requests": 1,
                    "target_num_ongoing_requests_per_replica": 2,
                    "prometheus_address": "http://user:secret@prometheus:9090",
                }
            },
            "autoscaling_config.target_num_ongoing_requests_per_replica\n  target_num_ongoing_requests_per_"
            "replica is another spelling of target_ongoing_requests",
        ),
    ],
)
def test_an_option_under_both_its_names_is_refused(
    model: type[Options], options: dict[str, Any], text: str
) -> None:
    message = message_of(model, **options)
    assert text in message
    assert "no option" not in message
    assert "secret" not in message


@each_case(
    ("model", "name", "hint"),
    [
        (BackendConfig, "num_replica", "Did you mean 'num_replicas'?"),
        (BackendConfig, "max_ongoing_request", "Did you mean 'max_ongoing_requests'?"),
        (BackendConfig, "ray_actor_options", "Ray Serve's name: pass actor_options={...}"),
        (BackendConfig, "route_prefix", "pass route_prefix=... to serve.run()"),
        (BackendConfig, "batch_wait_timeout_s", "use 'batch_wait_timeout'"),
        (BackendConfig, "num_cpus", "It belongs in actor_options."),
        (BackendConfig, "max_replicas", "It belongs in autoscaling_config."),
        (AutoscalingConfig, "num_replicas", "It belongs in config."),
        (ActorOptions, "runtime_env", "pass env=..."),
        (ActorOptions, "label_selector", "declare a resource on such workers"),
        (ActorOptions, "fallback_strategy", "list all suitable workers in 'workers'"),
        (BackendConfig, "accelerator_type", "It belongs in actor_options."),
        (LoggingConfig, "log_dir", "Did you mean 'logs_dir'?"),
        (BackendConfig, "backpressure_config", "leave it out"),
        (BackendConfig, "max_surge_percentage", "Did you mean 'max_surge_percent'?"),
        (HTTPOptions, "prot", "Did you mean 'port'?"),
    ],
)
def test_unknown_options_get_a_hint(model: type[Options], name: str, hint: str) -> None:
    assert hint in message_of(model, **{name: 1})


def test_an_unknown_option_of_a_nested_model_has_its_path() -> None:
    message = message_of(BackendConfig, autoscaling_config={"maximum_replicas": 1, "max_replicas": 0})
    assert "autoscaling_config.maximum_replicas" in message
    assert "AutoscalingConfig has no option 'maximum_replicas'. Did you mean 'max_replicas'?" in message
    assert "greater than or equal to 1" in message


def test_other_errors_beside_it_are_kept_and_passwords_are_not_shown() -> None:
    message = message_of(HTTPOptions, prot=1, port=70_000, ssl_keyfile_password="secret")
    assert "less than or equal to 65535" in message
    assert "secret" not in message


def test_credentials_stay_masked() -> None:
    url = "http://user:secret@prometheus:9090"
    message = message_of(BackendConfig, autoscaling_config={"prometheus_adress": url, "max_replicas": 2})
    assert "Did you mean 'prometheus_address'?" in message
    assert "secret" not in message


def test_a_deployment_names_the_valid_options() -> None:
    with pytest.raises(ValueError, match=r"no option 'proxy_location'.*'location' of http_options"):
        serve.deployment(proxy_location="HeadOnly")
    with pytest.raises(ValueError, match="has no option 'replicas'"):
        parse_options(BackendConfig, {"replicas": 1}, what="config")


class OwnRouter(RequestRouter):
    pass


class NoRouter:
    pass


@each_case(
    ("model", "options", "text"),
    [
        (PriorityConfig, {"header": "x priority"}, "'x priority' is not a valid name of a header"),
        (PriorityConfig, {"weights": {"high": 2}}, "'high', which is neither a number nor in classes (none)"),
        (
            PriorityConfig,
            {"classes": {"low": -1, "high": 1}, "weights": {"hi": 2}},
            "'hi', which is neither a number nor in classes (high, low)",
        ),
        (PriorityConfig, {"weights": {"101": 1}}, "weights has 101; priorities are from -100 to 100"),
        (PriorityConfig, {"weights": {"-101": 1}}, "weights has -101; priorities are from -100 to 100"),
        (
            RequestRouterConfig,
            {"session": "x-session"},
            "names no part of a request; give 'header:X-Session'",
        ),
        (RequestRouterConfig, {"session": "header:a b"}, "names no part of a request"),
        (RequestRouterConfig, {"request_router_class": NoRouter}, "NoRouter has no method choose_replicas"),
        (RequestRouterConfig, {"request_router_class": 1}, "1 is neither a class nor a name"),
        (
            RequestRouterConfig,
            {"request_router_class": "Roundrobin"},
            "'Roundrobin' must be one of PowerOfTwo",
        ),
        (RequestRouterConfig, {"request_router_class": "ray.other:Router"}, "is Ray's own code; use one of"),
        (
            RequestRouterConfig,
            {"request_router_class": "RoundRobin", "request_router_kwargs": {"a": {1}}},
            "its values must be JSON values: Object of type set",
        ),
        (
            RequestRouterConfig,
            {"request_router_class": "RoundRobin", "request_router_kwargs": {"a": "x" * 16_376}},
            "it has 16385 characters as JSON; 16384 are allowed",
        ),
        (
            RequestRouterConfig,
            {"request_router_kwargs": {"b": 1, "a": 2}},
            "request_router_kwargs has 'a', but PowerOfTwo takes no arguments",
        ),
        (
            GangSchedulingConfig,
            {"gang_size": 2, "runtime_failure_policy": "RESTART_REPLICA"},
            "is not available: a gang restarts as a whole",
        ),
        (TracingConfig, {"exporter_import_path": "exporter"}, "must be 'module:name' or 'module.name'"),
        (LoggingConfig, {"log_level": 15}, "15 is not a level of logging; give one of"),
        (LoggingConfig, {"log_level": True}, "True is not a level of logging"),
        (LoggingConfig, {"additional_log_standard_attrs": ["nme"]}, "'nme' is not an attribute of LogRecord"),
        (AutoscalingConfig, {"policy": {"function": "m:f"}}, "policy has no option 'function'; it takes"),
        (AutoscalingConfig, {"policy": "no path"}, "it must be one of"),
        (AutoscalingConfig, {"upscale_delay_s": float("inf")}, "inf is not a finite number"),
        (BackendConfig, {"rollout": {"steps": ["101%"]}}, "'101%' is not a share of the traffic"),
    ],
)
def test_errors_name_the_invalid_value_of_an_option(
    model: type[Options], options: dict[str, Any], text: str
) -> None:
    try:
        message = message_of(model, **options)
    except NotImplementedError as error:
        message = str(error)
    assert text in message


@each_case(
    ("model", "options", "expected"),
    [
        (PriorityConfig, {"header": "X-Priority"}, {"header": "X-Priority"}),
        (
            PriorityConfig,
            {"classes": {"high": 5}, "weights": {"high": 2, "-100": 3, "100": 1}},
            {"weights": {"high": 2.0, "-100": 3.0, "100": 1.0}},
        ),
        (RequestRouterConfig, {"request_router_class": None}, {"request_router_class": "PowerOfTwo"}),
        (
            RequestRouterConfig,
            {"request_router_class": "ray.serve.x.PowerOfTwoChoicesRequestRouter"},
            {"request_router_class": "PowerOfTwo"},
        ),
        (RequestRouterConfig, {"request_router_class": "b.c:D"}, {"request_router_class": "b.c:D"}),
        (RequestRouterConfig, {"request_router_class": OwnRouter}, {"request_router_class": OwnRouter}),
        (RequestRouterConfig, {"request_router_kwargs": None}, {"request_router_kwargs": {}}),
        (
            RequestRouterConfig,
            {"request_router_class": "RoundRobin", "request_router_kwargs": {"a": "x" * 16_375}},
            {"request_router_class": "RoundRobin"},
        ),
        (RequestRouterConfig, {"session": "cookie:session"}, {"session": "cookie:session"}),
        (TracingConfig, {"exporter_import_path": "a.b:c"}, {"exporter_import_path": "a.b:c"}),
        (TracingConfig, {"exporter_import_path": ""}, {"exporter_import_path": ""}),
        (LoggingConfig, {"log_level": 30}, {"log_level": "WARNING"}),
        (
            LoggingConfig,
            {"log_level": "debug", "encoding": "json"},
            {"log_level": "DEBUG", "encoding": "JSON"},
        ),
        (
            LoggingConfig,
            {"additional_log_standard_attrs": ["lineno", "asctime", "lineno"]},
            {"additional_log_standard_attrs": ["lineno", "asctime"]},
        ),
        (AutoscalingConfig, {"policy": {"name": "m:f"}}, {"policy": "m:f"}),
        (AutoscalingConfig, {"policy": {"policy_kwargs": {"a": 1}}, "max_replicas": 3}, {"max_replicas": 3}),
    ],
)
def test_values_are_taken_in_each_of_their_forms(
    model: type[Options], options: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = model(**options)
    assert {name: getattr(found, name) for name in expected} == expected


def test_the_router_options_for_callers_are_published() -> None:
    assert RequestRouterConfig().published() is None
    published = RequestRouterConfig(request_router_class="RoundRobin", session="header:a").published()
    assert published == {
        "router": "RoundRobin",
        "kwargs": {},
        "session": "header:a",
        "initial_backoff_s": 0.025,
        "backoff_multiplier": 2,
        "max_backoff_s": 0.5,
    }
    config = PriorityConfig(classes={"high": 5}, weights={"high": 2, "-3": 4})
    assert config.published()["weights"] == {5: 2.0, -3: 4.0}


@each_case(
    ("value", "expected"),
    [("25%", 25.0), (" 2.5 % ", 2.5), (25, 25.0), (0, 0.0), ("100%", 100.0)],
)
def test_a_share_of_the_traffic_is_a_percentage_or_a_whole_number(value: Any, expected: float) -> None:
    assert percent_of(value) == expected


@each_case("value", ["100.1%", -1, 101, "a", None, 2.5, True, "7", "1000%"])
def test_another_share_of_the_traffic_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="is not a share of the traffic"):
        percent_of(value)


def test_the_queue_of_a_policy_is_found_below_a_schedule_too() -> None:
    options = {"queue_name": "jobs", "broker": "sqlite"}
    assert queue_options_of("load", options) is None
    assert queue_options_of("schedule", {"policy": "load"}) is None
    with pytest.raises(ValueError, match="give a dict of keyword arguments"):
        queue_options_of("schedule", {"policy": "queue", "policy_kwargs": [1]})
    with pytest.raises(ValueError, match="give a dict of keyword arguments"):
        queue_options_of("queue", [1])  # type: ignore[arg-type]


def test_a_factor_above_one_is_probably_a_mistake() -> None:
    for name in ("smoothing_factor", "upscaling_factor", "downscaling_factor"):
        (warning,) = [
            each
            for each in AutoscalingConfig(max_replicas=9, **{name: 1.5}).warnings()
            if "overshoots" in each
        ]
        assert "set it to 1 or less" in warning
        assert not [
            each for each in AutoscalingConfig(max_replicas=9, **{name: 1}).warnings() if "overshoots" in each
        ]
