"""An option's default stands in its pydantic field and nowhere else."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
from pydantic import ValidationError
from tables import each_case

import daskserve as serve
from daskserve import options
from daskserve.client.definitions.graph import ApplicationGraph
from daskserve.control.decisions.applications import deploy
from daskserve.control.records.records import BackendRecord
from daskserve.control.records.state import State
from daskserve.control.records.storing.encoding import decode, encode
from daskserve.options.actor import ActorOptions
from daskserve.options.backend import BackendConfig
from daskserve.options.fields import base
from daskserve.options.http import HTTPOptions
from daskserve.options.specs import ApplicationSpec, BackendSpec
from daskserve.options.start_messages import (
    ControllerStart,
    ProxyStart,
    ReplicaStart,
    dump_config,
    dump_http,
    read_config,
)
from daskserve.proxies.exchange.server_state import ServerState
from daskserve.proxies.server.server import HTTPServer

ROOT = Path(__file__).parent.parent.parent
MODELS = (BackendConfig, ActorOptions, HTTPOptions)
NAMES = frozenset(name for model in MODELS for name in model.model_fields)
#: ``file:name`` of parameters that have the name of an option and another meaning, with the reason.
EXCEPTIONS = {
    "daskserve/data/batching/decorator.py:max_batch_size": "`serve.batch` has options of its own",
    "daskserve/cluster/local/cluster.py:workers": "the number of workers of the in-process cluster",
    "daskserve/data/tasks/http.py:root_path": "what is left out of an ASGI scope is empty",
    "proxies/ingress/errors.py:debug": "how one error is shown, not whether the instance shows errors",
} | dict.fromkeys(
    (
        "daskserve/control/rpc/inspecting.py:memory",
        "daskserve/data/replica/inspecting.py:memory",
        "daskserve/data/replica/inspection.py:memory",
        "daskserve/data/replica/process/inspection.py:memory",
    ),
    "whether a profile is of memory",
)


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


@each_case(
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


@each_case("message", [ReplicaStart, ProxyStart, ControllerStart, BackendSpec])
def test_start_messages_have_no_defaults(message: type) -> None:
    assert dataclasses.is_dataclass(message)
    for field in dataclasses.fields(message):
        is_required = field.default is field.default_factory is dataclasses.MISSING
        assert is_required or field.name == "parts", field.name  # these stay with the client


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
        None,
        False,
        {},
    )
    decoded = ReplicaStart.decode(start.encode())
    assert vars(decoded.config) == dump_config(BackendConfig())
    assert decoded.config.health_check_period_s == BackendConfig().health_check_period_s
    again = dataclasses.replace(decoded, config=read_config(vars(decoded.config)))
    assert again.encode() == start.encode()
    proxy = ProxyStart.decode(ProxyStart(HTTPOptions(), None, False, True, False, "h", {}, None).encode())
    assert HTTPOptions(**vars(proxy.options)) == HTTPOptions()
    assert vars(proxy.options) == dump_http(HTTPOptions())


def test_a_deploy_forms_a_config_once_in_the_client_and_once_in_the_controller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    formed: list[type] = []
    check = base.check_spellings
    monkeypatch.setattr(
        base, "check_spellings", lambda model, values: formed.append(model) or check(model, values)
    )

    def hello(request: object) -> str:
        return "hello"

    policy = {"policy": hello, "max_replicas": 5}
    made = serve.deployment(autoscaling_config=policy, max_ongoing_requests=5, user_config={"a": 1})(hello)
    assert formed.count(BackendConfig) == 1
    spec = ApplicationGraph(made.bind(), "shop").spec(route="/", request_id="r")
    assert formed.count(BackendConfig) == 1
    assert spec.ingress.spec.config.model_fields_set == {
        "autoscaling_config",
        "internal_metadata",
        "max_ongoing_requests",
    }
    found = ApplicationSpec.from_plain(msgpack.unpackb(msgpack.packb(spec.to_plain())))
    assert found == spec
    assert formed.count(BackendConfig) == 2
    deployed = deploy(State(), [found], new_goal=lambda: "g", now=0.0)
    record = next(each for each in deployed.change.values() if isinstance(each, BackendRecord))
    assert formed.count(BackendConfig) == 2
    assert decode(record.key, encode(record)) == record


def option_models(base_model: type[base.Options] = base.Options) -> Iterator[type[base.Options]]:
    for each in pkgutil.walk_packages(options.__path__, f"{options.__name__}."):
        importlib.import_module(each.name)
    for model in base_model.__subclasses__():
        yield model
        yield from option_models(model)


def test_every_default_may_be_given() -> None:
    """Pydantic does not check a default, so the bounds of an option may refuse its own default."""
    refused = []
    for model in option_models():
        for name, option in model.model_fields.items():
            if option.is_required():
                continue
            try:
                model.model_validate({name: option.get_default(call_default_factory=True)})
            except ValidationError as error:
                # Options that are required are missing here.
                refused += [(model, name, each["msg"]) for each in error.errors() if name in each["loc"]]
    assert refused == []
