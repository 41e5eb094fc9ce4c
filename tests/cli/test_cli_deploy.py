"""``daskserve deploy`` and its neighbours on an instance in this process, with code that a worker imports."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

import daskserve as serve
from daskserve.cli.instance import InstanceAddress
from daskserve.cli.main import main
from daskserve.cli.verbs import config_file as cli_config_file
from daskserve.cli.verbs import deploy as cli_deploy
from daskserve.cli.verbs import operate as cli_operate
from daskserve.client.verbs import declared
from daskserve.errors import NotRunningError
from daskserve.testing import local_instance

CODE = """
import daskserve as serve


@serve.deployment(num_replicas=1)
class Front:
    def __init__(self, greeting):
        self.greeting = greeting

    def __call__(self, request=None):
        return f"{self.greeting} 1"


def app(args):
    return Front.bind(args.get("greeting", "hi"))
"""
FILE: dict[str, Any] = {
    "applications": [
        {
            "name": "shop",
            "import_path": "MODULE:app",
            "route_prefix": "/shop",
            "args": {"greeting": "${GREETING:-hello}"},
        },
        {"name": "mail", "import_path": "MODULE:app", "route_prefix": "/mail"},
    ]
}


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[serve.Client]:
    with local_instance(workers=2) as client:

        @contextmanager
        def connected(at: InstanceAddress) -> Iterator[serve.Client]:
            yield client

        monkeypatch.setattr(cli_deploy, "connected", connected)
        monkeypatch.setattr(cli_deploy, "reading", connected)
        monkeypatch.setattr(cli_operate, "connected", connected)
        monkeypatch.setattr(cli_config_file, "reading", connected)
        yield client


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module of a unique name, and a file that deploys it."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    module = f"module_{tmp_path.parent.name}_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{module}.py").write_text(CODE)
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(FILE).replace("MODULE", module))
    return tmp_path


def call(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [*arguments])
    assert result.exit_code == code, result.output
    return result


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = folder / "serve.yaml"
    values = yaml.safe_load(file.read_text())
    change(values)
    file.write_text(yaml.safe_dump(values))


def answer(client: serve.Client, name: str = "shop") -> Any:
    return client.get_app_handle(name).remote().result(timeout_s=10)


def test_an_instance_that_ends_during_a_deploy_is_not_started_again(
    client: serve.Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*_: Any, **__: Any) -> None:
        raise NotRunningError("It has ended.")

    monkeypatch.setattr(type(client), "plan_config", end)
    assert call("deploy", "serve.yaml", code=3).stderr == "Error: It has ended.\n"


def test_a_file_is_deployed_shown_changed_and_deleted(client: serve.Client, folder: Path) -> None:
    result = call("deploy", "serve.yaml", "--wait", "--version", "abc")
    assert "+ application 'shop': new" in result.output
    assert result.output.endswith("shop: RUNNING\nmail: RUNNING\n")
    assert (answer(client), answer(client, "mail")) == ("hello 1", "hi 1")
    assert call("diff", "serve.yaml", "--exit-code").output == "Applications: 2 unchanged.\n"

    # The command shows the deployed configuration, with the reference.
    shown = yaml.safe_load(call("config").output)
    written = yaml.safe_load((folder / "serve.yaml").read_text())["applications"]
    assert shown == {"applications": [written[1], written[0]]}
    assert json.loads(call("config", "--json").stdout) == shown, "it deploys, too"
    assert client.get_config("shop")["git_version"] == "abc"

    # Another number of replicas, other code, and one application less.
    (module,) = folder.glob("module_*.py")
    module.write_text(CODE.replace("} 1", "} 2"))
    edit(folder, lambda values: values["applications"].pop())
    override = {"name": "Front", "num_replicas": 2}
    edit(folder, lambda values: values["applications"][0].update(deployments=[override]))
    plan = json.loads(call("diff", "serve.yaml", "--exit-code", "--json", code=4).stdout)
    assert plan["applications"]["mail"]["action"] == "deleted"
    changes = plan["applications"]["shop"]["deployments"]["Front"]["changes"]
    assert [each["option"] for each in changes] == ["code", "num_replicas"]
    found = json.loads(call("deploy", "serve.yaml", "--wait", "--json").stdout)
    assert found["applications"] == {"shop": {"status": "RUNNING", "message": ""}}
    assert answer(client) == "hello 2"
    assert client.status().backends["shop/Front"].running == 2


def test_a_module_that_raises_changes_nothing_and_its_traceback_is_shown(
    client: serve.Client, folder: Path
) -> None:
    call("deploy", "serve.yaml", "--wait")
    (module,) = folder.glob("module_*.py")
    module.write_text("raise RuntimeError('broken')")
    result = call("deploy", "serve.yaml", "--wait", code=1)
    assert "RuntimeError: broken" in result.output
    assert "Cannot be deployed: 'shop', 'mail'. Nothing was changed." in result.output
    assert client.get_config()["version"] == 1
    assert answer(client) == "hello 1"


def test_an_import_path_is_one_application_beside_those_of_the_file(
    client: serve.Client, folder: Path
) -> None:
    call("deploy", "serve.yaml", "--wait")
    (module,) = folder.glob("module_*.py")
    one = (f"{module.stem}:app", "greeting=hey", "--name", "one", "--route-prefix", "/one")
    plan = json.loads(call("deploy", *one, "--dry-run", "--json").stdout)["applications"]
    assert "deleted" not in {each["action"] for each in plan.values()}
    call("deploy", *one, "--wait")
    assert [answer(client, each) for each in ("one", "mail")] == ["hey 1", "hi 1"]


def test_a_deploy_that_waits_says_for_what(
    client: serve.Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(declared, "ROUND_S", 0.1)
    override = {"name": "Front", "ray_actor_options": {"num_cpus": 1000}}
    edit(folder, lambda values: values["applications"][0].update(deployments=[override]))
    result = call("deploy", "serve.yaml", "--wait", "--timeout-s", "0.5", code=1)
    lines = [each for each in result.stderr.splitlines() if each.startswith("shop waits: ")]
    assert len(lines) > 1
    assert "CPU 1000" in lines[-1]


def test_operators_scale_restart_and_delete(client: serve.Client, folder: Path) -> None:
    call("deploy", "serve.yaml", "--wait")
    assert call("scale", "shop", "2").output == "shop: target_num_replicas 2\n"
    before = {each.name for each in client.status().replicas("mail/Front")}
    assert call("restart", "mail/Front").output == "mail/Front: restarted\n"
    after = {each.name for each in client.status().replicas("mail/Front") if each.state == "RUNNING"}
    assert len(after) == 1
    assert after.isdisjoint(before)
    assert "Applications: 2 unchanged." in call("diff", "serve.yaml").output
    assert call("delete", "mail").output == "mail: deleted\n"
    assert list(client.status().applications) == ["shop"]
    assert "'mail' does not exist; there are: shop." in call("delete", "mail", code=1).stderr
    assert call("delete", "mail", "--ignore-not-found").output == "mail: not found\n"
    result = call("restart", "mail", "--json", code=1)
    assert json.loads(result.stderr)["error"]["type"] == "NotFoundError"


@pytest.mark.parametrize("command", ["deploy", "diff"])
def test_options_of_import_paths_are_refused_with_a_file(folder: Path, command: str) -> None:
    for given, text in (
        (("--name", "shop"), "--name is for import paths only; set it in the file 'serve.yaml' instead"),
        (("--route-prefix", "/x"), "--route-prefix is for import paths only"),
        (("a=1",), "The file 'serve.yaml' sets its own args; leave out a=1"),
    ):
        assert text in call(command, "serve.yaml", *given, code=2).stderr
    assert (
        "--name is for import paths only; set it in the file '-'"
        in call(command, "-", "--name", "x", code=2).stderr
    )


def test_a_file_that_cannot_be_read_is_wrong_usage(folder: Path) -> None:
    (folder / "binary.yaml").write_bytes(b"\xff\xfe")
    assert (
        "The file 'missing.yaml' cannot be read: No such file" in call("diff", "missing.yaml", code=2).stderr
    )
    error = json.loads(call("diff", "binary.yaml", "--json", code=2).stderr)["error"]
    assert (error["type"], error["message"][:44]) == (
        "UsageError",
        "The file 'binary.yaml' is not text in UTF-8:",
    )


def test_the_file_of_what_runs_deploys_to_the_same(client: serve.Client, folder: Path) -> None:
    @serve.deployment
    def own(request: Any = None) -> str:
        return "own"

    call("deploy", "serve.yaml", "--wait")
    client.run(own.bind(), name="own", route_prefix="/own")
    built = call("build", "--running", "-o", "running.yaml")
    assert built.stderr == "own: left out, because a program has deployed it\n"
    assert call("diff", "running.yaml", "--exit-code").stdout == "Applications: 2 unchanged.\n"
