"""Which modules of a project count as used by one of them."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from tables import each_case

from daskserve.payload.used_modules import modules_named_in, references_in, used_by


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return tmp_path


def imported(folder: Path, **sources: str | None) -> dict[str, ModuleType]:
    """Return modules with these sources; ``a__b`` is ``a.b``. None: the file does not exist."""
    found = {}
    for key, source in sources.items():
        name = key.replace("__", ".")
        module = found[name] = ModuleType(name)
        file = folder / f"{name}.py"
        module.__file__ = str(file)
        module.__package__ = name.rpartition(".")[0]
        if source is not None:
            file.write_text(source)
    return found


@each_case(
    ("source", "names"),
    [
        ("import a, b.c as d", {"a", "b.c"}),
        ("from a.b import c, d", {"a.b.c", "a.b.d"}),
        ("from . import c\nfrom .b import d\nfrom ..e import f", {"pkg.sub.c", "pkg.sub.b.d", "pkg.e.f"}),
        ("def f():\n    import a", {"a"}),
        ("if TYPE_CHECKING:\n    from a import b", {"a.b"}),
        ("from a import *", {"a.*"}),
        ("app = deployment('shop.main:app', 'x.y', 'plain', 'no path: 1')", {"shop.main.app", "x.y"}),
        ("from importlib.metadata import version", {"importlib.metadata.version"}),
        ("import importlib\nimportlib.import_module(NAME)", None),
        ("from importlib import import_module", None),
        ("import django", None),
        ("__import__(NAME)", None),
        ("model.eval()", set()),
    ],
)
def test_the_references_of_a_source(source: str, names: set[str] | None) -> None:
    assert references_in(source.encode(), "pkg.sub") == names


def test_only_what_a_module_uses_counts(project: Path) -> None:
    modules = imported(
        project, shop="import items", items="from common import text", common="", common__text="",
        common__other="", mail="import items",
    )  # fmt: skip
    assert list(used_by(["shop"], modules)) == ["common", "common.text", "items", "shop"]
    assert set(used_by(["shop", "mail", "missing"], modules)) == {*modules} - {"common.other"}


def test_a_package_whose_names_are_all_imported_counts_whole(project: Path) -> None:
    modules = imported(project, shop="from common import *", common="", common__text="", commonplace="")
    assert set(used_by(["shop"], modules)) == {"shop", "common", "common.text"}


def test_modules_that_use_each_other_count_once(project: Path) -> None:
    modules = imported(project, a="import b", b="import a")
    assert list(used_by(["a"], modules)) == ["a", "b"]


@each_case("source", ["import importlib", "def f(:", "from ........ import a", None])
def test_all_modules_count_if_one_may_import_any(project: Path, source: str | None) -> None:
    modules = imported(project, shop="import items", items=source, other="")
    assert used_by(["shop"], modules) == modules
    assert list(used_by(["other"], modules)) == ["other"]


def test_modules_without_a_source_may_import_any(project: Path) -> None:
    modules = imported(project, shop="import native", native=None, other="")
    modules["native"].__file__ = str(project / "native.so")
    assert used_by(["shop"], modules) == modules


def test_import_paths_in_arguments_name_modules() -> None:
    args = {"engine": "engines.parrot:Parrot", "plain": ["words", 3, {"x": "pkg.Class"}]}
    assert modules_named_in(args) >= {"engines.parrot", "pkg"}
    assert modules_named_in({"text": "see: this", "n": 1.5}) == set()
