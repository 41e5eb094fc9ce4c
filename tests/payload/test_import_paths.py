"""Import paths of modules that change while a process runs."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from daskserve.errors import CodeLoadError
from daskserve.payload.importing import ImportPath, ModuleScan, import_definition, modules_in


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path with ``shop``, which imports ``items``."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "shop.py").write_text("from items import TEXT\ndef app():\n    return TEXT\n")
    write(tmp_path, "old")
    yield tmp_path
    forget()


def write(project: Path, text: str) -> None:
    file = project / "items.py"
    before = file.stat().st_mtime if file.exists() else 0.0
    file.write_text(f"TEXT = {text!r}\n")
    # Python compares whole seconds to decide whether its compiled file is outdated.
    os.utime(file, (before + 2, before + 2))


def forget() -> None:
    for name in ("shop", "items"):
        sys.modules.pop(name, None)


@pytest.fixture(autouse=True)
def _without_others() -> Iterator[None]:
    yield
    sys.modules.pop("other", None)


def deployed() -> ImportPath:
    """Return the path as a new program sends it, and restore this process's imported modules."""
    before = {name: sys.modules[name] for name in ("shop", "items") if name in sys.modules}
    forget()
    importlib.invalidate_caches()
    import_definition("shop:app")
    path = ImportPath.of("shop:app")
    forget()
    sys.modules.update(before)
    return path


def test_a_changed_module_is_imported_again(project: Path) -> None:
    first = import_definition(deployed())
    write(project, "new")
    assert import_definition("shop:app") is first
    second = import_definition(deployed())
    assert (first(), second()) == ("old", "new")


def test_modules_that_did_not_change_stay(project: Path) -> None:
    assert import_definition(deployed()) is import_definition(deployed())


def test_modules_of_an_unknown_version_are_imported_again(project: Path) -> None:
    """The process has imported them for other code, perhaps long ago."""
    import_definition("shop:app")
    write(project, "new")
    assert import_definition(deployed())() == "new"


def test_other_files_than_those_of_the_program_are_warned_of(
    project: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = deployed()
    write(project, "here")
    assert import_definition(path)() == "here"
    (warning,) = caplog.messages
    assert "module items differs" in warning


def test_a_path_differs_with_its_modules_and_not_with_others(project: Path) -> None:
    first = deployed()
    assert set(first.modules) == {"shop", "items"}
    write(project, "new")
    assert deployed().modules != first.modules
    assert (ImportPath.of("os.path.join").modules, ImportPath.of("starlette.requests:Request").modules) == (
        {},
        {},
    )


def test_other_files_than_those_of_a_revision_are_refused(project: Path) -> None:
    """A rollback must not serve new code under an old name."""
    path = deployed()
    write(project, "here")
    with pytest.raises(
        CodeLoadError, match=r"the file of module items on .* differs from that of the revision"
    ):
        import_definition(path, is_exact=True)
    write(project, "old")
    forget()
    assert import_definition(path, is_exact=True)() == "old"


def test_modules_that_were_imported_for_others_do_not_count(project: Path) -> None:
    """The version of a path does not depend on what its process has imported before."""
    (project / "other.py").write_text("import items")
    importlib.import_module("other")
    assert set(deployed().modules) == {"shop", "items"}


def test_modules_that_use_a_changed_one_are_forgotten_with_it(project: Path) -> None:
    """Otherwise, a path that is imported later would find its module with the old one."""
    (project / "other.py").write_text("from items import TEXT\ndef app():\n    return TEXT\n")
    import_definition("other:app")
    import_definition(deployed())
    write(project, "new")
    import_definition(deployed())
    assert import_definition("other:app")() == "new"


class Leaving(ModuleType):
    """A module that another thread forgets while its file is read."""

    @property
    def __file__(self) -> str:
        forget()
        return sys.argv[0]


def test_modules_that_another_thread_forgets_meanwhile_do_no_harm(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_definition("shop:app")
    monkeypatch.setitem(sys.modules, "zz_leaving", Leaving("zz_leaving"))
    assert set(ImportPath.of("shop:app").modules) == {"shop", "items"}


def test_the_modules_of_a_folder_are_found_by_each_of_its_names(project: Path) -> None:
    importlib.import_module("shop")
    other = project / "other"
    other.symlink_to(project)
    for folder in (project, other):
        assert sorted(modules_in([str(folder)])) == ["items", "shop"]
    assert modules_in([str(project / "shop")]) == {}


def test_a_scan_sees_modules_that_are_imported_and_forgotten_later(project: Path) -> None:
    scan = ModuleScan()
    assert list(scan.modules_in(str(project))) == []
    importlib.import_module("items")
    assert list(scan.modules_in(str(project))) == ["items"]
    old = scan.modules_in(str(project))
    assert scan.modules_in(str(project)) is old
    del sys.modules["items"]
    new = importlib.import_module("items")
    assert scan.modules_in(str(project)) == {"items": new}
