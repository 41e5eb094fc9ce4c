"""Unknown options, and options under two names: the error says what to write instead."""

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
        (ActorOptions, "fallback_strategy", "list all workers that are good enough in 'workers'"),
        (BackendConfig, "accelerator_type", "It belongs in actor_options."),
        (LoggingConfig, "log_dir", "Did you mean 'logs_dir'?"),
        (BackendConfig, "backpressure_config", "leave it out"),
        (BackendConfig, "max_surge_percentage", "Did you mean 'max_surge_percent'?"),
        (HTTPOptions, "prot", "Did you mean 'port'?"),
    ],
)
def test_what_was_meant_is_named(model: type[Options], name: str, hint: str) -> None:
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
