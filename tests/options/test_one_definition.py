"""An option's default stands in its pydantic field and nowhere else."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from daskserve.options.actor import ActorOptions
from daskserve.options.backend import BackendConfig
from daskserve.options.backend_spec import BackendSpec
from daskserve.options.http import HTTPOptions
from daskserve.options.start_messages import (
    ControllerStart,
    ProxyStart,
    ReplicaStart,
    dump_config,
    dump_http,
    read_config,
)
from daskserve.proxies.exchange.server_state import ServerState
from daskserve.proxies.server.life import HTTPServer

ROOT = Path(__file__).parent.parent.parent
MODELS = (BackendConfig, ActorOptions, HTTPOptions)
NAMES = frozenset(name for model in MODELS for name in model.model_fields)
#: ``file:name`` of parameters that have the name of an option and another meaning, with the reason.
EXCEPTIONS = {
    "daskserve/data/batching/decorator.py:max_batch_size": "`serve.batch` has options of its own",
    "daskserve/cluster/local/cluster.py:workers": "the number of workers of the in-process cluster",
    "proxies/ingress/errors.py:debug": "how one error is shown, not whether the instance shows errors",
}


def restated(path: str, source: str) -> Iterator[str]:
    """Find parameters, fields and look-ups that give an option another default."""
    for node in ast.walk(ast.parse(source)):
        found: list[tuple[str, ast.expr | None]] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            args = node.args
            positional = [*args.posonlyargs, *args.args]
            plain = list(zip(reversed(positional), reversed(args.defaults), strict=False))
            found = [(arg.arg, value) for arg, value in plain]
            found += [
                (arg.arg, value)
                for arg, value in zip(args.kwonlyargs, args.kw_defaults, strict=True)
                if value
            ]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            found = [(node.target.id, node.value)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            key = node.args[0] if node.args else None
            if isinstance(key, ast.Constant) and isinstance(key.value, str) and len(node.args) == 2:
                found = [(key.value, node.args[1])]
        for name, value in found:
            is_none = isinstance(value, ast.Constant) and value.value is None
            if name in NAMES and isinstance(value, ast.Constant) and not is_none:
                yield f"{path}:{name}"


def test_no_default_is_restated() -> None:
    rooms = ("actors.py", "options/start_messages.py", "control", "data", "cluster")
    files = [
        path
        for path in [*(ROOT / "daskserve").rglob("*.py"), *(ROOT / "proxies").rglob("*.py")]
        if path.relative_to(ROOT).parts[0] == "proxies" or path.relative_to(ROOT).parts[1] in rooms
    ]
    found = {
        each
        for path in files
        for each in restated(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    }
    assert found - EXCEPTIONS.keys() == set()


@pytest.mark.parametrize(
    "source",
    [
        "def f(host='0.0.0.0'): ...",
        "def f(*, max_body_bytes=5): ...",
        "class A:\n    event_loop: str = 'own'",
        "config.get('health_check_period_s', 5)",
    ],
)
def test_a_restated_default_is_found(source: str) -> None:
    assert list(restated("x.py", source))


@pytest.mark.parametrize("message", [ReplicaStart, ProxyStart, ControllerStart, BackendSpec])
def test_what_carries_options_has_no_defaults(message: type) -> None:
    assert dataclasses.is_dataclass(message)
    for field in dataclasses.fields(message):
        assert field.default is field.default_factory is dataclasses.MISSING, field.name


def test_servers_take_their_options_as_the_model() -> None:
    assert "options" in inspect.signature(HTTPServer).parameters
    limits = {"max_body_bytes", "max_message_bytes", "idle_timeout_s"}
    defaults = {name: inspect.signature(ServerState).parameters[name].default for name in limits}
    assert set(defaults.values()) == {inspect.Parameter.empty}


def test_a_start_message_holds_every_default() -> None:
    start = ReplicaStart(
        "b",
        "b#A",
        b"code",
        BackendConfig(),
        8,
        None,
        None,
        False,
        False,
        "b@1",
        (0, 0, 0, 1),
        {},
        (),
        (),
        (),
        False,
    )
    decoded = ReplicaStart.decode(start.encode())
    assert vars(decoded.config) == dump_config(BackendConfig())
    assert decoded.config.health_check_period_s == BackendConfig().health_check_period_s
    again = dataclasses.replace(decoded, config=read_config(decoded.config.model_dump()))
    assert again.encode() == start.encode()
    proxy = ProxyStart.decode(ProxyStart(HTTPOptions(), None, False, True, "h").encode())
    assert HTTPOptions(**proxy.options.model_dump()) == HTTPOptions()
    assert dump_http(proxy.options) == dump_http(HTTPOptions())
