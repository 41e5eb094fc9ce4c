"""The programs of the tutorial work unchanged, and return the answers in the tutorial."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import daskserve as serve
from daskserve.testing import local_instance

STEPS = Path(__file__).parent.parent / "docs/tutorial"


def text_of(step: str) -> str:
    return (STEPS / f"{step}.md").read_text(encoding="utf-8")


def program(step: str) -> str:
    found = re.search(r"^```python\n(.*?)^```$", text_of(step), re.DOTALL | re.MULTILINE)
    assert found is not None
    return found.group(1)


@pytest.fixture(scope="module")
def instance() -> Iterator[serve.Client]:
    with local_instance(http_options={"port": 0}) as client:
        yield client


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The reader's folder, from which ``prices`` is imported."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("prices", "test_prices"):
        sys.modules.pop(name, None)


def answers_as_shown(step: str, instance: serve.Client) -> None:
    (url,) = instance.http_urls()
    shown = re.findall(r"^\$ (curl \".*)\n(.*)$", text_of(step), re.MULTILINE)
    assert shown
    for command, answer in shown:
        words = [word.replace("http://127.0.0.1:8000", url) for word in shlex.split(command)]
        ended = subprocess.run([*words, "-sS"], capture_output=True, text=True, timeout=30)
        assert (ended.stdout, ended.stderr) == (answer, "")


def test_the_tests_of_the_project_pass(project: Path) -> None:
    """This test runs first, because those tests shut down the nearest instance."""
    (project / "prices.py").write_text(program("4-composition"))
    (project / "test_prices.py").write_text(program("5-test"))
    assert pytest.main(["-q", "-p", "no:cacheprovider", "-c", "/dev/null", str(project)]) == 0


def test_the_function(project: Path, instance: serve.Client) -> None:
    names: dict[str, Any] = {"__name__": "prices"}
    exec(program("1-function"), names)
    instance.run(names["price"].bind())
    answers_as_shown("1-function", instance)
    instance.delete_application("default")


@pytest.mark.parametrize("step", ["2-fastapi", "3-class", "4-composition", "6-batching"])
def test_the_program_of_a_step(step: str, project: Path, instance: serve.Client) -> None:
    (project / "prices.py").write_text(program(step))
    instance.run("prices:app")
    answers_as_shown(step, instance)
    instance.delete_application("default")


def test_the_options_of_autoscaling_fit_the_program(project: Path, instance: serve.Client) -> None:
    options = program("7-autoscaling").partition("class Model")[0]
    old = "@serve.deployment(num_replicas=2, max_ongoing_requests=64)\n"
    assert program("6-batching").count(old) == 1
    (project / "prices.py").write_text(program("6-batching").replace(old, options))
    instance.run("prices:app")
    answers_as_shown("6-batching", instance)
    instance.delete_application("default")


def test_an_instance_is_started_and_changes_under_load(
    project: Path, instance: serve.Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here it runs in one process; tests/integration uses clusters."""
    started: list[dict[str, Any]] = []
    monkeypatch.setattr(serve, "start", lambda **options: started.append(options))
    source = program("8-cluster")
    assert source.startswith("from distributed import Client\n")
    exec(source.replace("distributed import Client", "contextlib import nullcontext as Client", 1), {})
    assert started == [
        {"detached": True, "store": "sqlite:////tmp/prices.db", "http_options": {"port": 8000}}
    ]
    (project / "prices.py").write_text(program("6-batching"))
    instance.run("prices:app")
    answers_as_shown("8-cluster", instance)
    load = program("10-update").replace("http://127.0.0.1:8000", instance.http_urls()[0])
    exec(load.replace("+ 20", "+ 0.2"), {})
    *batches, counted = capsys.readouterr().out.splitlines()
    assert set(batches) == {"1 at once"}
    assert re.fullmatch(r'\d+ {"price":305000.0}', counted)
    instance.delete_application("default")
