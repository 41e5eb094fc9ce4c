"""The options of the policy ``queue``, and the masking of their passwords."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from tables import each_case

from daskserve.autoscaling.policies import load_policy
from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.options.backend import BackendConfig
from daskserve.options.fields.secrets import masked
from daskserve.options.queues import QueueOptions

SECRET = "s3cr3t"
REDIS = {"broker_url": f"redis://user:{SECRET}@h:6379/0", "queue_name": "tasks"}


def config(**kwargs: Any) -> AutoscalingConfig:
    return AutoscalingConfig(policy="queue", policy_kwargs=kwargs)


@each_case(
    ("kwargs", "message"),
    [
        ({}, "missing a required argument: 'broker_url'; it needs a broker_url and a queue_name"),
        ({"broker_url": REDIS["broker_url"]}, "missing a required argument: 'queue_name'"),
        ({**REDIS, "queue": "x"}, "unexpected keyword argument 'queue'"),
        ({**REDIS, "broker_url": f"kafka://:{SECRET}@h"}, "begins with one of redis://"),
        ({**REDIS, "broker_url": f"localhost:6379?password={SECRET}"}, "begins with one of redis://"),
        ({**REDIS, "broker_url": f"redis://:{SECRET}@h:port/0"}, "which is not a URL"),
        ({**REDIS, "broker_url": f"redis://:{SECRET}@[h/0"}, "which is not a URL"),
        ({**REDIS, "broker_url": 6379}, "give a URL as a string"),
        ({**REDIS, "broker_url": "unix://"}, "without a path"),
        ({**REDIS, "broker_url": f"amqp://u:{SECRET}@/v"}, "without a host"),
        ({**REDIS, "broker_url": "sqlite://tasks.sqlite"}, "give an absolute path"),
        ({**REDIS, "broker_url": "sqlite:///"}, "give an absolute path"),
        ({**REDIS, "broker_url": "instance://shop"}, 'write "instance://"'),
        ({**REDIS, "queue_name": ""}, "give the name of a queue"),
        ({**REDIS, "queue_name": 7}, "give the name of a queue"),
        ({**REDIS, "poll_interval_s": 0}, "0.1 or more"),
        ({**REDIS, "poll_interval_s": float("inf")}, "0.1 or more"),
        ({**REDIS, "poll_interval_s": True}, "a number of seconds"),
        ({**REDIS, "poll_interval_s": "10"}, "a number of seconds"),
        (
            {**REDIS, "rabbitmq_management_url": f"http://u:{SECRET}@h"},
            "omit rabbitmq_management_url for Redis",
        ),
        (
            {"broker_url": "amqp://h", "queue_name": "q", "rabbitmq_management_url": f"u:{SECRET}@h:15672"},
            "give a URL such as",
        ),
    ],
)
def test_invalid_options_are_refused(kwargs: dict[str, Any], message: str) -> None:
    for wrong in (
        lambda: config(**kwargs),
        lambda: BackendConfig(**{"autoscaling_config": {"policy": "queue", "policy_kwargs": kwargs}}),
        lambda: AutoscalingConfig(
            policy="schedule",
            policy_kwargs={"schedule": {"* * * * *": 1}, "policy": "queue", "policy_kwargs": kwargs},
        ),
    ):
        with pytest.raises(ValidationError) as caught:
            wrong()
        assert message in str(caught.value)
        if "@" in str(kwargs) or "password=" in str(kwargs):
            assert SECRET[:3] not in str(caught.value)


def test_no_error_about_other_options_shows_credentials() -> None:
    good = {"policy": "queue", "policy_kwargs": REDIS}
    for wrong in (
        {"num_replicas": 2, "autoscaling_config": good},
        {"autoscaling_config": {**good, "max_replicas": 1, "min_replicas": 2}},
        {"autoscaling_config": {**good, "max_replica": 1}},
        {"autoscaling_config": {**good, "policy_kwargs": str(REDIS)}},
        {"autoscaling_config": {**good, "policy": "promql"}},
        {"autoscaling_configs": good},
    ):
        with pytest.raises(ValidationError) as caught:
            BackendConfig(**wrong)
        assert SECRET not in f"{caught.value!s} {caught.value!r} {caught.value.errors()}"
    config = BackendConfig(**{"autoscaling_config": good})
    with pytest.raises(ValidationError) as caught:
        config.num_replicas = 3
    assert SECRET not in str(caught.value)
    assert SECRET not in repr(config)
    assert config.autoscaling_config is not None
    assert config.autoscaling_config.policy_kwargs == REDIS


def test_errors_show_the_invalid_value() -> None:
    with pytest.raises(ValidationError, match=r"greater than or equal to 1 .*input_value=-3") as caught:
        BackendConfig(num_replicas=-3)
    assert caught.value.errors()[0]["loc"] == ("num_replicas",)
    with pytest.raises(ValidationError, match="has no option"):
        BackendConfig(**{"nun_replicas": 3})


def test_an_error_about_policy_arguments_shows_no_credentials() -> None:
    url = REDIS["broker_url"]
    with pytest.raises(ValueError, match="does not accept policy_kwargs") as caught:
        load_policy(AutoscalingConfig(policy="classic", policy_kwargs={"broker_url": url}))
    assert SECRET not in str(caught.value)


@each_case(
    ("text", "shown"),
    [
        ("redis://:p@h:1/0", "redis://***@h:1/0"),
        ("redis://u:p@ss@h/0", "redis://***@h/0"),
        ("unix:///run/r.sock?db=1&password=p", "unix:///run/r.sock?db=1&password=***"),
        ("redis://h/0?username=u&password=p&db=1", "redis://h/0?username=***&password=***&db=1"),
        ("cannot reach amqp://u:p@h/v, sorry", "cannot reach amqp://***@h/v, sorry"),
        ("url is 'u:p@h:1'", "url is '***@h:1'"),
        ("mail to me@example.com", "mail to me@example.com"),
        ("http://h/a@b", "http://h/a@b"),
    ],
)
def test_credentials_in_text_are_masked(text: str, shown: str) -> None:
    assert masked(text) == shown
    assert masked({"a": [text, 1], text: None}) == {"a": [shown, 1], shown: None}


@each_case(
    ("broker", "management", "base", "vhost", "login"),
    [
        ("amqp://h", None, "http://h:15672", "/", ("guest", "guest")),
        ("amqp://u:p@h:5672//", None, "http://h:15672", "/", ("u", "p")),
        ("amqp://u:p%40@h/%2F", None, "http://h:15672", "/", ("u", "p@")),
        ("amqps://u:p@h/prod%2Feu", None, "https://h:15671", "prod/eu", ("u", "p")),
        ("pyamqp://u:p@[::1]/v", None, "http://[::1]:15672", "v", ("u", "p")),
        ("amqp://u:p@h/v", "https://m:1/base/", "https://m:1/base", "v", ("u", "p")),
        ("amqp://u:p@h/v", "http://a:b@m:15672/api/", "http://m:15672", "v", ("a", "b")),
    ],
)
def test_the_management_url_of_a_queue(
    broker: str, management: str | None, base: str, vhost: str, login: tuple[str, str]
) -> None:
    found = QueueOptions(broker, "q", management).management()
    assert (found.base, found.vhost, (found.username, found.password)) == (base, vhost, login)


def test_options_do_not_show_their_urls() -> None:
    options = QueueOptions("amqp://u:s3cr3t@h", "q", "http://u:s3cr3t@h")
    assert SECRET not in f"{options!r} {options.management()!r}"
