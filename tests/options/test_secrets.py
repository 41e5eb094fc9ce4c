"""Secrets in options: references, where they are read, and how they are shown."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from control_harness import backend
from pydantic import ValidationError
from tables import each_case

import daskserve as serve
from daskserve.cluster.protocols.base import ActorSpec
from daskserve.common.clock import LoopClock
from daskserve.common.types import ActorKind
from daskserve.config_file.masking import shown
from daskserve.control.records.state import State
from daskserve.control.records.storing.encoding import decode, encode
from daskserve.control.scaling.backlog import Backlog
from daskserve.control.scaling.prometheus import PrometheusQueries
from daskserve.control.views import introspection
from daskserve.data.replica.environment.interpreters import interpreter_of
from daskserve.errors import BadRequestError
from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.options.environment import Environment
from daskserve.options.fields.secrets import (
    HIDDEN,
    MAX_BYTES,
    checked_secret,
    hidden,
    is_reference,
    masked,
    read_secret,
    without_secrets,
)
from daskserve.options.http import HTTPOptions
from daskserve.options.queues import QueueOptions
from daskserve.options.start_messages import ProxyStart

VALUE = "hunter2"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(f"{VALUE}\n")
    return path


def test_a_long_text_is_masked_at_once() -> None:
    began = time.process_time()
    for text in ("a" * 300_000, "a:" * 50_000):
        assert masked(text) == text
    assert masked(f"{text}{VALUE}@h") == "***@h"
    assert time.process_time() - began < 5


# ---- references


def test_a_secret_is_read_from_the_environment_or_a_file_or_is_itself(file: Path) -> None:
    assert read_secret({"env": "A"}, "o", {"A": VALUE}) == VALUE
    assert read_secret({"file": str(file)}, "o", {}) == VALUE
    for text in (VALUE, "env:A", "", " "):
        assert checked_secret(text) == read_secret(text, "o", {}) == text


def test_a_file_keeps_all_but_its_last_newline(file: Path) -> None:
    file.write_bytes(b" two\nlines \r\n")
    assert read_secret({"file": str(file)}, "o", {}) == " two\nlines "


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read on .*, where it is used: No such file"),
        (b"", "is empty on "),
        (b"\n", "is empty on "),
        (b"\xffhunter2", "it is not UTF-8 text"),
        (VALUE.encode() * MAX_BYTES, "it has more than 64 KiB"),
    ],
)
def test_an_error_names_the_option_and_the_file_and_shows_nothing(
    tmp_path: Path, content: bytes | None, problem: str
) -> None:
    path = tmp_path / "s"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadRequestError, match=rf"my_option is \{{'file': '{path}'\}}, .*{problem}") as caught:
        read_secret({"file": str(path)}, "my_option", {})
    assert "hunter2" not in str(caught.value)


def test_a_missing_variable_is_named() -> None:
    with pytest.raises(
        BadRequestError, match=r"my_option is \{'env': 'A'\}, but there is no such environment"
    ):
        read_secret({"env": "A"}, "my_option", {"B": VALUE})
    with pytest.raises(BadRequestError, match="which is empty"):
        read_secret({"env": "A"}, "my_option", {"A": ""})


@each_case(
    "value",
    [{}, {"env": "A", "file": "/a"}, {"key": VALUE}, {"env": 1}, {"env": ""}, {"file": "a/b"}, 5, [VALUE]],
)
def test_invalid_secret_references_are_refused_and_not_shown(value: Any) -> None:
    with pytest.raises(ValueError, match="reference") as caught:
        checked_secret(value)
    assert VALUE not in str(caught.value)
    with pytest.raises(ValidationError, match="reference") as refused:
        HTTPOptions(ssl_certfile="c", ssl_keyfile_password=value)
    assert VALUE not in str(refused.value)


# ---- where they are read


def test_the_key_of_a_proxy_is_opened_where_the_proxy_is(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from daskserve.proxies import listener

    given: list[Any] = []
    monkeypatch.setattr(listener, "server_context", lambda *files: given.append(files))
    monkeypatch.setenv("KEY_PASSWORD", VALUE)
    for value in ({"file": str(file)}, {"env": "KEY_PASSWORD"}, VALUE):
        options = HTTPOptions(ssl_certfile="c", ssl_keyfile="k", ssl_keyfile_password=value)
        how = {"reuse_port": False, "claims_port": True, "may_move": False, "public_host": "h"}
        how |= {"tracing": {}, "logging": None}
        start = ProxyStart(options, None, **how).encode()  # type: ignore[arg-type]
        assert (VALUE.encode() in start) == (value == VALUE)
        listener.tls_of(ProxyStart.decode(start).options)
    assert given == [("c", "k", VALUE)] * 3


def test_the_variables_of_a_replica_are_read_where_it_runs(file: Path) -> None:
    given = {"A": "plain", "B": {"file": str(file)}, "C": {"env": "HERE"}}
    text = Environment(env_vars=given).to_text()
    assert VALUE not in text
    found = asyncio.run(interpreter_of(text, {"HERE": "here"}))
    assert found.variables == {"HERE": "here", "A": "plain", "B": VALUE, "C": "here"}
    with pytest.raises(BadRequestError, match=r"env_vars\['C'\] is \{'env': 'HERE'\}"):
        asyncio.run(interpreter_of(text, {}))


class Queue:
    """The queue at a URL."""

    def __init__(self, options: QueueOptions) -> None:
        self.url = options.url
        self.closes = 0

    async def read(self) -> float:
        return 3.0

    async def close(self) -> None:
        self.closes += 1


async def test_the_url_of_a_broker_is_read_at_each_poll(tmp_path: Path) -> None:
    path = tmp_path / "url"
    queues: list[Queue] = []

    def open_queue(options: QueueOptions) -> Queue:
        queues.append(Queue(options))
        return queues[-1]

    arguments = {"broker_url": {"file": str(path)}, "queue_name": "q"}
    options = AutoscalingConfig(policy="queue", policy_kwargs=arguments).queue_options()
    assert options is not None
    backlog = Backlog("b", options, open_queue=open_queue, clock=LoopClock())

    async def poll(content: str | None) -> None:
        if content is not None:
            path.write_text(content)
        await backlog._poll()

    await poll(None)
    assert "queue 'q' cannot be read: broker_url is {'file'" in backlog.problem
    await poll("ftp://u:hunter2@h")
    assert "broker_url is 'ftp://***@h'" in backlog.problem
    await poll("redis://:one@h\n")
    await poll(None)
    assert (backlog.value(), backlog.problem) == (3.0, "")
    await poll("redis://:two@h")
    assert [(each.url, each.closes) for each in queues] == [("redis://:one@h", 1), ("redis://:two@h", 0)]


def test_both_urls_of_rabbitmq_may_be_references() -> None:
    options = QueueOptions.parse(
        {"broker_url": "amqp://h", "queue_name": "q", "rabbitmq_management_url": {"env": "URL"}}
    )
    resolved = options.resolved({"URL": f"https://u:{VALUE}@m:1"})
    assert (resolved.management().base, resolved.management().password) == ("https://m:1", VALUE)
    with pytest.raises(ValueError, match=r"give a URL") as caught:
        options.resolved({"URL": f"u:{VALUE}@m"})
    assert VALUE not in str(caught.value)
    with pytest.raises(ValueError, match=r"broker_url: .*reference"):
        QueueOptions.parse({"broker_url": {"variable": VALUE}, "queue_name": "q"})


def test_the_address_of_prometheus_is_read_at_each_poll() -> None:
    variables: dict[str, str] = {}
    urls: list[str] = []

    async def fetch(url: str) -> bytes:
        urls.append(url)
        raise ValueError(f"unsupported: http://u:{VALUE}@p")

    config = AutoscalingConfig(prometheus_address={"env": "P"})
    assert config.prometheus_address is not None
    asked = PrometheusQueries(
        config.prometheus_address, {"lag": "up"}, fetch=fetch, clock=LoopClock(), variables=variables
    )
    asyncio.run(asked.refresh())
    assert "prometheus_address is {'env': 'P'}" in asked.errors()["lag"]
    variables["P"] = f"http://u:{VALUE}@p/"
    asyncio.run(asked.refresh())
    assert urls == [f"http://u:{VALUE}@p/api/v1/query?query=up"]
    assert asked.errors() == {"lag": "unsupported: http://***@p"}


# ---- what is shown


def test_only_references_are_shown() -> None:
    assert hidden({"env": "A"}) == {"env": "A"}
    assert hidden(VALUE) == hidden({"envv": VALUE}) == hidden([VALUE]) == "***"
    assert hidden(None) is None
    assert not is_reference({"env": "A", "file": "/a"})
    shown = repr(Environment(env_vars={"env": VALUE, "B": {"file": "/b"}}))
    assert "env_vars={'env': '***', 'B': {'file': '/b'}}" in shown


WRONG: Mapping[str, Callable[[], Any]] = {
    "a password without a certificate": lambda: HTTPOptions(ssl_keyfile_password=VALUE),
    "a password that is bytes": lambda: HTTPOptions(ssl_certfile="c", ssl_keyfile_password=VALUE.encode()),
    "a misspelled password": lambda: HTTPOptions(ssl_keyfile_pasword=VALUE),
    "an assigned password": lambda: setattr(
        HTTPOptions(ssl_certfile="c", ssl_keyfile_password=VALUE), "ssl_certfile", None
    ),
    "variables beside other errors": lambda: Environment(env_vars={"A": VALUE}, packages=["a"], python="/a"),
    "short variables": lambda: Environment(packages=["a"], python="/a", env_vars={"": VALUE}),
    "variables in a list": lambda: Environment(env_vars=[VALUE]),
    "a variable of a wrong type": lambda: Environment(env_vars={"A": [VALUE]}),
    "a wrong name of variables": lambda: Environment(env_var={"A": VALUE}),
    "the password of a store": lambda: serve.start(store=f"redis://user:{VALUE}@host/0"),
    "variables of a deployment": lambda: serve.deployment(env={"env_vars": {"A": [VALUE]}})(
        type("D", (), {})
    ),
}


@each_case("make", WRONG.values())
def test_errors_do_not_show_secrets(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        make()
    assert VALUE not in str(caught.value)
    assert VALUE not in repr(caught.value)


def test_records_messages_and_infos_do_not_show_secrets() -> None:
    env = Environment(env_vars={"A": VALUE, "B": {"env": "B"}}).to_text()
    config = {"isolation": "process"}
    record = backend(env=env, config=config, user_config=VALUE.encode(), is_deployment=True)
    assert decode(record.key, encode(record)) == record
    assert VALUE not in repr(record)
    state = State()
    state.backends["b"] = record
    info = introspection.deployment_info(state, "b")
    assert VALUE not in repr(info)
    assert '"B": {"env": "B"}' in info["actor_options"]["env"]
    spec = ActorSpec(ActorKind.REPLICA, "a", 1, "i", VALUE.encode())
    assert VALUE not in repr(spec)
    interpreter = asyncio.run(interpreter_of(env, {"B": VALUE}))
    assert VALUE not in repr(interpreter)


def test_an_option_without_a_secret_is_shown_as_it_is() -> None:
    assert shown({"env_vars": None, "others": [{"env_vars": {"A": "a"}}]}) == {
        "env_vars": None,
        "others": [{"env_vars": {"A": "***"}}],
    }


@each_case(
    ("name", "value", "expected"),
    [
        ("password", "x", HIDDEN),
        ("config.api_key", "x", HIDDEN),
        ("private-key", "x", "x"),
        ("credentials", {"user": "a", "empty": ""}, {"user": HIDDEN, "empty": ""}),
        ("max_tokens", 5, 5),
        ("max_tokens", 2.5, 2.5),
        ("max_tokens", "5", HIDDEN),
        ("token", 5, HIDDEN),
        ("tokens.secret", 5, HIDDEN),
        ("token", None, None),
        ("token", 0, 0),
        ("width", 5, 5),
        ("width", "http://user:x@host", "http://***@host"),
        ("a", {"b": {"password": 1, "c": 2}}, {"b": {"password": HIDDEN, "c": 2}}),
    ],
)
def test_values_with_names_of_secrets_are_hidden(name: str, value: Any, expected: Any) -> None:
    assert without_secrets(name, value) == expected
