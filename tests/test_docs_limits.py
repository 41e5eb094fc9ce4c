"""docs/limits.md has every limit with its default, and metrics that exist; SECURITY.md names what exists."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from daskserve.cluster.scheduler.http.api import operations
from daskserve.common.settings import ChannelSettings, Timeouts
from daskserve.control.scaling import fetching
from daskserve.data.caller.routing import replay
from daskserve.data.replica.environment import working_dir
from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.options.backend import BackendConfig
from daskserve.options.deployment_actor import DeploymentActorConfig
from daskserve.options.environment import Environment
from daskserve.options.fields import secrets
from daskserve.options.fields.base import Options
from daskserve.options.http import HTTPOptions
from daskserve.options.queues import QueueOptions
from daskserve.proxies.exchange.limits.limits import LIMITS
from daskserve.proxies.exchange.request import body as request_body
from daskserve.proxies.exchange.websocket import connection as websocket_line
from daskserve.proxies.exchange.websocket import inbox as websocket_inbox
from daskserve.proxies.exchange.websocket import session as websocket
from daskserve.telemetry.table import SECTIONS, MetricKind

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs/limits.md").read_text()
SECURITY = (ROOT / "SECURITY.md").read_text()
#: The first cells of the rows of all tables, and the other cells.
ROWS = {
    cells[0]: cells[1:]
    for line in TEXT.splitlines()
    if line.startswith("| ") and not line.startswith(("| ---", "| limit |"))
    for cells in [[cell.strip() for cell in line[1:-1].split("|")]]
}

#: Options with names such as these are limits.
LIMIT = re.compile(r"(max|min)_.*|.*_(timeout|grace)_s")
#: Exceptions: how long a proxy's place is kept does not concern requests.
NO_LIMITS = {"return_grace_s"}
#: Limits without a metric, because only the program gets an error, or nothing happens.
NOT_COUNTED = {
    "`daskserve.timeouts.proxy-s`",
    "`daskserve.timeouts.connect-s`",
    "`daskserve.channel.retry-direct-s`",
    "files of `working_dir`",
    "a secret that an option [refers to](../SECURITY.md#secrets)",
    "answer of Prometheus or RabbitMQ to the controller",
}

OPTIONS = [
    (
        f"`{name}`" + " of a backend" * (model is BackendConfig and name in HTTPOptions.model_fields),
        field.default,
    )
    for model in (HTTPOptions, BackendConfig)
    for name, field in model.model_fields.items()
    if LIMIT.fullmatch(name) and name not in NO_LIMITS
]
SETTINGS = [
    (f"`daskserve.{section}.{each.name.replace('_', '-')}`", each.default)
    for section, model in (("timeouts", Timeouts), ("channel", ChannelSettings))
    for each in fields(model)
    if each.name.endswith("_s")
]


def test_the_page_has_tables_of_four_columns() -> None:
    assert len(ROWS) > 20
    assert {name for name, cells in ROWS.items() if len(cells) != 3} == set()


def test_every_limit_is_listed_with_its_default() -> None:
    for name, default in (*OPTIONS, *SETTINGS):
        assert name in ROWS, "add a row to docs/limits.md"
        assert re.fullmatch(rf"`{re.escape(repr(default))}`( \(.*\))?", ROWS[name][0]), name


def test_every_row_is_an_option_that_exists() -> None:
    models: list[type[Options]] = [HTTPOptions, BackendConfig, DeploymentActorConfig]
    known = {name for model in models for name in model.model_fields}
    named = {match[1] for name in ROWS if (match := re.match(r"`(\w+)`", name))}
    assert named - known - {"CONNECT"} == set()
    settings = {name for name in ROWS if name.startswith("`daskserve.")}
    assert settings == {name for name, _ in SETTINGS}


def test_every_metric_exists_and_every_limit_of_http_is_counted() -> None:
    kinds = {spec.exported_name: spec.kind for specs in SECTIONS.values() for spec in specs}
    assert set(re.findall(r"daskserve_\w+", TEXT)) - kinds.keys() == set()
    counted = {
        name
        for name in HTTPOptions.model_fields
        for cell in [ROWS.get(f"`{name}`", ("", "", ""))[2]]
        if any(kinds[metric] is MetricKind.COUNTER for metric in re.findall(r"daskserve_\w+", cell))
    }
    limits = {name.strip("`") for name, _ in OPTIONS} & HTTPOptions.model_fields.keys()
    assert limits - counted == set()
    assert {name for name, cells in ROWS.items() if cells[2] == "none"} == NOT_COUNTED
    labels = set(re.findall(r"limit `(\w+)`", TEXT))
    assert labels - {*LIMITS, "request_id"} == set()
    assert {name for name in LIMITS if name not in HTTPOptions.model_fields} - labels == set()


def test_fixed_limits_are_those_of_the_code() -> None:
    fixed = {
        "unread body": f"{request_body.HIGH_WATER_BYTES >> 10} KiB",
        "messages that user code has not received": f"{websocket_inbox.MAX_INBOX_BYTES >> 20} MiB",
        "offers and parameters": f"{websocket.MAX_ELEMENTS}",
        "pongs": f"{websocket_line.MAX_PONGS}",
        "silence": f"{websocket_line.PING_S:.0f} to {2 * websocket_line.PING_S:.0f} s",
        "files of `working_dir`": f"{working_dir.MAX_BYTES >> 20} MiB",
        "a secret": f"{secrets.MAX_BYTES >> 10} KiB",
        "body of a request to the scheduler": f"{operations.SMALL_BYTES >> 10} KiB",
        "answer of Prometheus": f"{fetching.MOST_BYTES >> 20} MiB",
    }
    for name, value in fixed.items():
        (found,) = (cells[0] for row, cells in ROWS.items() if row.startswith(name))
        assert found == value, name


def test_the_limit_of_retried_bodies_is_that_of_the_code() -> None:
    assert f"more than {replay.KEPT_BYTES >> 10} KiB is not retried" in TEXT


# ---- SECURITY.md


def keywords(name: str) -> list[Any]:
    """Return the values of a keyword argument in the page's examples, which are literals."""
    found = []
    for example in re.findall(r"```python\n(.*?)```", SECURITY, re.DOTALL):
        nodes = [each for each in ast.walk(ast.parse(example)) if isinstance(each, ast.keyword)]
        found += [
            eval(compile(ast.Expression(each.value), "SECURITY.md", "eval"))
            for each in nodes
            if each.arg == name
        ]
    return found


def test_the_options_in_the_examples_are_valid() -> None:
    first, second = (HTTPOptions(**options) for options in keywords("http_options"))
    assert first.ssl_keyfile_password == {"file": "/run/secrets/key-password"}
    assert second.trusted_forwarders == ["127.0.0.1"]
    (env,) = keywords("env")
    assert Environment(**env).env_vars["API_KEY"] == {"env": "PROVIDER_KEY"}


def test_every_option_that_takes_references_is_named() -> None:
    section = SECURITY.partition("## Secrets")[2].partition("\n## ")[0]
    kept = {"file": "/a"}
    HTTPOptions(ssl_certfile="c", ssl_keyfile_password=kept)
    Environment(env_vars={"A": kept})
    AutoscalingConfig(prometheus_address=kept)
    QueueOptions(broker_url=kept, queue_name="q", rabbitmq_management_url=kept)
    names = (
        "ssl_keyfile_password",
        "env_vars",
        "prometheus_address",
        "broker_url",
        "rabbitmq_management_url",
    )
    assert [name for name in names if name not in section] == []
