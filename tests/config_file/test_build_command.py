"""``daskserve build`` and ``daskserve schema``: their output is read again, with the same meaning."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from daskserve.cli.main import main
from daskserve.client.hosting.building import build_configured
from daskserve.config_file.json_schema import json_schema
from daskserve.config_file.model import ApplicationConfig
from daskserve.config_file.reading import read
from daskserve.options.specs import ApplicationSpec

MODULE = """
import daskserve as serve

def policy(context): ...

@serve.deployment(
    num_replicas=2, max_surge="25%", user_config={"a": [1, 2]}, ray_actor_options={"num_cpus": 0.5},
    env={"env_vars": {"A": "b"}}, version="v1", graceful_shutdown_timeout_s=3,
)
class Model:
    def __call__(self): ...

@serve.deployment(autoscaling_config={"max_replicas": 4, "policy": policy}, health_check_period_s=3)
class Scaled:
    def __init__(self, *args): ...
    def __call__(self): ...

app = Scaled.bind(Model.bind(), Model.bind())
other = Model.bind()
async def plain(scope, receive, send): ...
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "built_shop.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "built_shop", raising=False)
    return tmp_path


def command(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def facts(spec: ApplicationSpec) -> Any:
    """Return the facts that distinguish two versions of an application."""
    return replace(
        spec,
        request_id="",
        deployments=tuple(replace(each, spec=replace(each.spec, request_id="")) for each in spec.deployments),
    ).to_plain()


def test_the_built_file_deploys_the_same_application(folder: Path) -> None:
    done = command("build", "built_shop:app", "built_shop:other", "built_shop:plain", "-o", "serve.yaml")
    assert done.exit_code == 0, done.output
    assert done.stderr == (
        "app, Scaled: autoscaling_config stays in the code, because it is not a plain value\n"
    )
    text = (folder / "serve.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=daskserve.schema.json\n")
    applications = read(text).config.applications
    assert [(each.name, each.route_prefix) for each in applications] == [
        ("app", "/app"),
        ("other", "/other"),
        ("plain", "/plain"),
    ]
    assert applications[0].deployments[0].options == {
        "num_replicas": 2,
        "max_surge": "25%",
        "user_config": {"a": [1, 2]},
        "graceful_shutdown_timeout_s": 3.0,
        "actor_options": {"num_cpus": 0.5},
        "env": {"env_vars": {"A": "b"}},
        "version": "v1",
    }
    for each in applications:
        code = ApplicationConfig(name=each.name, route_prefix=each.route_prefix, import_path=each.import_path)
        assert facts(build_configured(each).spec) == facts(build_configured(code).spec)


def test_one_application_is_the_default_one(folder: Path) -> None:
    done = command("build", "built_shop:other", "--app-dir", str(folder))
    (config,) = read(done.stdout).config.applications
    assert (config.name, config.route_prefix, config.import_path) == ("default", "/", "built_shop:other")


def test_json_is_the_same_configuration(folder: Path) -> None:
    arguments = ("build", "built_shop:app", "--app-dir", str(folder))
    done = command(*arguments, "--json", "-o", "serve.json")
    text = Path("serve.json").read_text()
    assert (done.stdout, command(*arguments, "--json").stdout) == ("", text)
    assert json.loads(text) == read(command(*arguments).stdout).config.to_plain()
    failed = command("build", "built_shop:nothing", "--json")
    assert (failed.exit_code, set(json.loads(failed.stderr)["error"])) == (1, {"type", "message"})


def test_mistakes_are_messages() -> None:
    assert command("build").exit_code == 2
    unwritable = command("build", "built_shop:app", "-o", "/nowhere/at/all.yaml")
    assert (unwritable.exit_code, "Could not write /nowhere/at/all.yaml: No such" in unwritable.stderr) == (
        1,
        True,
    )
    missing = command("build", "built_shop:nothing")
    assert missing.exit_code == 1
    assert "built_shop has no 'nothing'" in missing.stderr
    assert "would have the same name" in command("build", "built_shop:app", "built_shop:app").stderr


def test_the_schema_is_printed_as_json() -> None:
    assert json.loads(command("schema").stdout) == json_schema()
    assert command("schema", "--json").stdout == command("schema").stdout
