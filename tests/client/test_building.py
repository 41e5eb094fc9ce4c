"""Building the application of an import path: which errors are the user's, and how they are shown."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from daskserve.client.hosting import building
from daskserve.client.hosting.builder import Builder
from daskserve.client.hosting.building import build_path
from daskserve.client.verbs.applications import RunTarget
from daskserve.common.clock import LoopClock
from daskserve.config_file.model import ApplicationConfig
from daskserve.errors import BadRequestError, ReplicaStartError, UnavailableError
from daskserve.options.start_messages import BuilderStart
from daskserve.payload.importing import ImportPath

MODULE = """
import pydantic
import daskserve as serve

@serve.deployment
class Model:
    def __init__(self, *args): ...
    def __call__(self): ...

class Args(pydantic.BaseModel):
    size: int

def build(args):
    return Model.bind(args)

def typed(args: Args):
    return Model.bind(args.size)

def fail(args):
    raise ValueError("of the user")

def misuse(args):
    return Model.options(num_replicas="many").bind()
"""


ENDING = """
import project

def end(args):
    raise KeyboardInterrupt

app = project.build(())
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "project.py").write_text(MODULE)
    (tmp_path / "ending.py").write_text(ENDING)
    (tmp_path / "script.py").write_text("import sys\nsys.exit('done')")
    (tmp_path / "broken.py").write_text("import missing_library")
    (tmp_path / "typo.py").write_text("app = = 1")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("project", "script", "broken", "typo"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_a_builder_gets_the_arguments(folder: Path) -> None:
    built = build_path(RunTarget("project:build", "shop", "/shop", {"a": "1"}), "", 5.0)
    assert (built.spec.name, built.spec.route, built.spec.timeout_s) == ("shop", "/shop", 5.0)
    assert [each.name for each in built.spec.deployments] == ["Model"]


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("project:missing", "Import path 'project:missing': project has no 'missing'."),
        ("nowhere:app", "there is no module 'nowhere' here. Install it on the workers, too"),
        ("project:Model", "deployment 'Model', which is not bound"),
        ("project:typed", "cannot be built from 'project:typed': size is missing"),
    ],
)
def test_a_mistake_in_the_call_has_a_message_only(folder: Path, target: str, text: str) -> None:
    with pytest.raises((BadRequestError, TypeError)) as caught:
        build_path(RunTarget(target, args={}), "", None)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("target", "first", "last"),
    [
        ("project:fail", 'project.py", line 20, in fail', "ValueError: of the user"),
        ("project:misuse", 'project.py", line 23, in misuse', "num_replicas"),
        ("broken:app", 'broken.py", line 1', "ModuleNotFoundError: No module named 'missing_library'"),
        ("script:app", 'script.py", line 2', "SystemExit: done"),
        ("typo:app", 'typo.py", line 1', "SyntaxError: invalid syntax"),
    ],
)
def test_an_error_of_the_users_code_shows_the_users_lines(
    folder: Path, target: str, first: str, last: str
) -> None:
    with pytest.raises(ReplicaStartError, match=f"cannot be built from '{target}'") as caught:
        build_path(RunTarget(target), "", None)
    remedy = "on their PYTHONPATH." if target == "broken:app" else "Correct the code, and run it again."
    assert str(caught.value).endswith(remedy)
    lines = caught.value.user_traceback.splitlines()
    assert first in next(line for line in lines if "File " in line)
    assert any(last in line for line in lines[-12:])
    assert not any("importlib" in line for line in lines)


def test_a_build_does_not_wait_for_an_import_that_hangs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "LOCK_S", 0.05)
    is_held, is_over = threading.Event(), threading.Event()

    def hang() -> None:
        with ImportPath.lock:
            is_held.set()
            is_over.wait(20)

    thread = threading.Thread(target=hang)
    thread.start()
    assert is_held.wait(20)
    try:
        with pytest.raises(UnavailableError, match="Another import in this process"):
            building.build_configured(ApplicationConfig(import_path="project:build"))
    finally:
        is_over.set()
        thread.join()
    assert building.build_configured(ApplicationConfig(import_path="project:build")).spec.name == "default"


async def test_a_builder_returns_each_application_or_its_error(folder: Path) -> None:
    paths = ("project:build", "ending:end", "project:fail", "ending:app")
    configs = [ApplicationConfig(name=path[-3:], import_path=path).to_plain() for path in paths]
    payload = BuilderStart(configs).encode()
    context: Any = SimpleNamespace(
        spec=SimpleNamespace(payload=payload, instance="daskserve"), clock=LoopClock()
    )
    builder = Builder(context)
    built, ended, failed, last = (await builder.start())["built"]
    assert [each["spec"]["name"] for each in (built, last)] == ["ild", "app"]
    assert "raised KeyboardInterrupt" in ended["error"]
    assert 'ValueError("of the user")' in failed["user_traceback"]
    assert builder.stage()[0] == "building 'app' from 'ending:app'"
