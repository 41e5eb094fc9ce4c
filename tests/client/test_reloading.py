"""Following the files of a project: which files are watched, and which deployments a change replaces."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from daskserve.client.hosting.reloading.files import FileWatch, Patterns, changed_files
from daskserve.client.hosting.reloading.project import Project
from daskserve.client.hosting.reloading.reloader import Reloader
from daskserve.client.hosting.sources import Source
from daskserve.client.verbs.applications import RunTarget
from daskserve.errors import ReplicaStartError, SupersededError

SHOP = """
import daskserve as serve
import prices
import unused_part

@serve.deployment
class Whole:
    def __call__(self): return 1

@serve.deployment
class Shop:
    def __init__(self, other): self.other = other
    def __call__(self): return prices.PRICE

app = Shop.bind(Whole.bind())
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "prices.py").write_text("PRICE = 1")
    (tmp_path / "unused_part.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("shop", "prices", "unused_part"):
        sys.modules.pop(name, None)


def save(file: Path, text: str) -> None:
    """Save a file as editors do: write another one, and rename it."""
    other = file.with_name(f"{file.name}~")
    other.write_text(text)
    os.replace(other, file)


def versions(folder: Path, others: str = "", recreates: bool = False) -> dict[str, str | None]:
    source = Source((RunTarget("shop:app"),), project=Project((str(folder),), others, recreates))
    (built,) = source.build("")
    return {each.name: each.spec.version for each in built.spec.deployments}


def test_python_files_and_included_ones_are_watched(tmp_path: Path) -> None:
    watched = {"shop.py", "pkg/deep/part.py", "page.html"}
    others = {
        "page.txt",
        ".hidden.py",
        ".git/hook.py",
        "shop.py~",
        "__pycache__/a.py",
        "venv/x.py",
        "build/x.py",
    }
    for name in (*watched, *others, "venv/pyvenv.cfg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    patterns = Patterns.of([str(tmp_path)], ["*.html"], ["build/"], str(tmp_path / "page.txt"))
    found = {Path(each).relative_to(tmp_path).as_posix() for each in patterns.snapshot()}
    assert found == {*watched, "page.txt"}
    assert patterns.other_files() == [str(tmp_path / "page.html")]


def test_a_saved_a_new_and_a_removed_file_are_changes(folder: Path) -> None:
    patterns = Patterns.of([str(folder)])
    before = patterns.snapshot()
    assert changed_files(before, patterns.snapshot()) == []
    save(folder / "shop.py", SHOP)
    (folder / "new.py").touch()
    (folder / "prices.py").unlink()
    names = [Path(each).name for each in changed_files(before, patterns.snapshot())]
    assert names == ["new.py", "prices.py", "shop.py"]


def test_files_that_are_saved_together_are_one_change(folder: Path) -> None:
    ended = threading.Event()
    watch = FileWatch(Patterns.of([str(folder)]), ended)
    for name in ("shop.py", "prices.py"):
        save(folder / name, "# new")
    assert [Path(each).name for each in watch.wait()] == ["prices.py", "shop.py"]
    ended.set()
    assert watch.wait() == []


def test_only_code_that_uses_a_changed_file_is_a_new_version(folder: Path) -> None:
    first = versions(folder)
    assert versions(folder) == first
    save(folder / "prices.py", "PRICE = 2")  # of the same length, and in the same second
    second = versions(folder)
    assert second["Whole"] == first["Whole"]
    assert second["Shop"] != first["Shop"]
    assert sys.modules["prices"].PRICE == 2
    save(folder / "shop.py", SHOP.replace("return 1", "return 2"))
    assert versions(folder)["Whole"] != first["Whole"]
    save(folder / "prices.py", "PRICE = 1")
    save(folder / "shop.py", SHOP)
    assert versions(folder) == first, "what was there before is that version again"
    assert versions(folder, others="page")["Whole"] != first["Whole"], "any code may read other files"


def test_a_version_that_the_code_names_depends_on_the_code_too(folder: Path) -> None:
    named = SHOP.replace("@serve.deployment\nclass Whole", '@serve.deployment(version="1")\nclass Whole')
    save(folder / "shop.py", named)
    first = versions(folder)
    assert str(first["Whole"]).startswith("1-")
    assert versions(folder) == first
    save(folder / "shop.py", named.replace("return 1", "return 2"))
    assert versions(folder)["Whole"] != first["Whole"]


def test_code_that_cannot_be_imported_leaves_the_modules_that_run(folder: Path) -> None:
    versions(folder)
    old = sys.modules["shop"], sys.modules["prices"]
    save(folder / "prices.py", "PRICE = 3")
    save(folder / "shop.py", SHOP.replace("app =", "app = nothing or"))
    with pytest.raises(ReplicaStartError) as caught:
        versions(folder)
    assert "NameError: name 'nothing' is not defined" in caught.value.user_traceback
    assert (sys.modules["shop"], sys.modules["prices"]) == old


def test_a_file_that_changes_while_it_is_imported_is_another_one_the_next_time(folder: Path) -> None:
    text = """
from pathlib import Path
PRICE = {}
Path(__file__).write_text(Path(__file__).with_name("next").read_text())
"""
    (folder / "next").write_text("PRICE = 2")
    (folder / "prices.py").write_text(text.format(1))
    first = versions(folder)
    assert sys.modules["prices"].PRICE == 1
    assert versions(folder)["Shop"] != first["Shop"]
    assert sys.modules["prices"].PRICE == 2


def test_a_deployment_may_end_before_its_successor_starts(folder: Path) -> None:
    source = Source((RunTarget("shop:app"),), project=Project((str(folder),), recreates=True))
    (built,) = source.build("")
    assert {each.spec.config.max_surge for each in built.spec.deployments} == {0}


def test_a_factory_is_a_new_version_with_each_state_of_its_module(folder: Path) -> None:
    def version() -> Any:
        source = Source((RunTarget("shop:create"),), project=Project((str(folder),)), is_factory=True)
        return source.build("")[0].spec.ingress.spec.version

    (folder / "shop.py").write_text("def create(): ...")
    first = version()
    save(folder / "shop.py", "def create(): 1")
    assert version() != first


def test_the_ingress_alone_has_the_number_of_workers(folder: Path) -> None:
    options = {"num_replicas": 3, "isolation": "process"}
    (built,) = Source((RunTarget("shop:app"),), ingress=options).build("")
    found = {each.name: each.spec.config for each in built.spec.deployments}
    assert (found["Shop"].num_replicas, found["Shop"].isolation) == (3, "process")
    assert found["Whole"].num_replicas == 1


def test_an_error_is_reported_once_and_the_next_save_is_deployed(folder: Path) -> None:
    lines: list[str] = []
    changed = threading.Condition()
    outcomes: list[Any] = [
        ReplicaStartError("It failed.", user_traceback="Traceback"),
        lambda: "deployed",
    ]

    def build() -> Any:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def report(line: str) -> None:
        with changed:
            lines.append(line)
            changed.notify()

    def wait_for(*expected: str) -> None:
        with changed:
            assert changed.wait_for(lambda: lines == list(expected), 5), lines
            lines.clear()

    reloader = Reloader(Patterns.of([str(folder)]), build, report)
    reloader.start()
    name = os.path.relpath(folder)
    shown = str(folder) if name.startswith("..") else name
    wait_for(f"Watching {shown} for changes.")
    save(folder / "shop.py", "# 1")
    wait_for(f"{shown}/shop.py changed; reloading.", "It failed.\n\nTraceback")
    save(folder / "shop.py", "# 2")
    wait_for(f"{shown}/shop.py changed; reloading.", "Reloaded.")
    reloader.stop()


def test_a_failing_watch_is_reported_and_a_file_that_changes_later_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def notified() -> Iterator[object]:
        yield
        raise RuntimeError("no watches are left")

    ended = threading.Event()
    watch = FileWatch(Patterns.of([str(folder)]), ended)
    watch._notifications = notified()
    save(folder / "shop.py", "# 1")
    assert watch.wait() == [str(folder / "shop.py")]
    threading.Timer(0.05, save, (folder / "shop.py", "# 2")).start()
    assert watch.wait() == [str(folder / "shop.py")]

    lines: list[str] = []
    monkeypatch.setattr("daskserve.client.hosting.reloading.reloader.RETRY_S", 0.0)
    reloader = Reloader(Patterns.of([str(folder)]), lambda: lambda: None, lines.append)
    answers: list[Any] = [RecursionError("too deep"), ["shop.py"]]

    def wait() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(reloader._watch, "wait", wait)
    assert reloader._changed() == ["shop.py"]
    assert lines == ["The files cannot be watched now: RecursionError('too deep')"]


def test_a_program_that_fails_before_it_watches_files_ends(folder: Path) -> None:
    Reloader(Patterns.of([str(folder)]), lambda: lambda: None, print).stop()


def test_a_change_that_a_newer_one_replaces_is_not_reported(folder: Path) -> None:
    lines: list[str] = []
    reloader = Reloader(Patterns.of([str(folder)]), lambda: lambda: None, lines.append)
    reloader._newest = 2
    with reloader._errors_reported(1):
        raise SupersededError("A later change came.")
    with reloader._errors_reported(2):
        raise SupersededError("Another program came.")
    assert lines == ["Another program came."]
