"""Environments of replicas: packages installed once, variables, and files to work in."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dask.config
import numpy
import pytest
from replica_harness import call, replica_of
from replica_starts import replica_start

from daskserve.client.definitions.specs import make_spec
from daskserve.data.replica.environment import kept_folders, packages, working_dir
from daskserve.data.replica.environment.interpreters import interpreter_of
from daskserve.errors import BadRequestError, ReplicaStartError
from daskserve.options.environment import Environment

DEADLINE_S = 60


def make_wheel(folder: Path, *, version: str) -> str:
    """Create a wheel of a package with a command and one module, which contains its version."""
    name = f"daskserve_test_layer-{version}"
    path = folder / f"{name}-py3-none-any.whl"
    head = f"Metadata-Version: 2.1\nName: daskserve-test-layer\nVersion: {version}\n"
    files = {
        "daskserve_test_layer.py": f"VERSION = {version!r}\n",
        f"{name}.dist-info/METADATA": head,
        f"{name}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{name}.dist-info/RECORD"
    with zipfile.ZipFile(path, "w") as wheel:
        for place, text in files.items():
            wheel.writestr(place, text)
        wheel.writestr(record, "".join(f"{place},,\n" for place in (*files, record)))
    return str(path)


def is_held(folder: str) -> bool:
    """Return whether a process keeps a folder from being deleted; runs in that of a replica."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def facts() -> dict[str, Any]:
    """Return facts about a replica's process; runs there."""
    import daskserve_test_layer  # type: ignore[import-not-found]

    return {
        "version": daskserve_test_layer.VERSION,
        "variable": os.environ.get("LAYER"),
        "prefix": sys.prefix,
        "numpy": numpy.__file__,
        "is_held": is_held(sys.prefix),
    }


class Facts:
    """Returns the result of `facts` of the working directory's module, or of this module."""

    def __init__(self, where: str) -> None:
        self.where = where

    def ask(self) -> Any:
        if self.where == "packages":
            return facts()
        import helper_in_folder  # type: ignore[import-not-found]

        return {
            "text": helper_in_folder.text(),
            "cwd": os.getcwd(),
            "data": Path("data/a.txt").read_text(),
            "is_held": is_held("."),
        }


HOLDER = """
import sys
from pathlib import Path
from daskserve.data.replica.environment.kept_folders import hold
hold(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def run_replica(where: str, env: Any) -> Any:
    """Start a replica as the controller does, call it, stop it, and return its answer."""
    spec = make_spec("b", Facts, (where,), {}, actor_options=None, config=None, timeout_s=None, env=env)
    start = replica_start(Facts, concurrency=2, environment=spec.env)
    replica = replica_of(replace(start, code=spec.code, config=spec.config))

    async def main() -> Any:
        async with asyncio.timeout(DEADLINE_S):
            starting = asyncio.create_task(replica.start())
            await asyncio.sleep(0)
            if where == "packages":
                assert replica.stage() == ("installing its environment", 0.0)
            await starting
            # The constructor has its own time limit, which begins after the installation.
            assert (replica.stage()[0], replica.stage()[1] > 0) == ("running its constructor", True)
            try:
                return await call(replica, "ask")
            finally:
                await replica.stop(0)

    return asyncio.run(main())


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of environments of this machine, shared by the tests: an installation takes seconds."""
    folder = tmp_path_factory.mktemp("environments")
    with dask.config.set({"daskserve.process.environments-folder": str(folder)}):
        yield folder


def test_packages_are_installed_once_over_those_of_the_worker(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {"pip": [make_wheel(tmp_path, version="1.0")], "env_vars": {"LAYER": "over"}}
    found = run_replica("packages", env)
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    assert (found["version"], found["variable"], found["prefix"]) == ("1.0", "over", str(folder))
    assert found["numpy"] == numpy.__file__  # the worker's
    assert found["is_held"]
    assert [path.name for path in cache.iterdir() if path.stat().st_mode & 0o077] == []
    monkeypatch.setattr(packages, "_run", None)  # nothing is installed any more
    assert run_replica("packages", env) == found


@pytest.mark.nightly
def test_an_interrupted_installation_begins_again(cache: Path, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, version="2.0")
    broken = packages.folder_of([wheel], cache)
    broken.mkdir(parents=True)
    (broken / "bin").write_text("what a killed process left")
    assert run_replica("packages", {"packages": [wheel]})["version"] == "2.0"


def test_packages_that_cannot_be_installed_say_why(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ReplicaStartError, match=r"(?s)/no/such\.whl.* cannot be installed on .*exited with"):
        run_replica("packages", {"packages": ["/no/such.whl"]})


def test_uv_is_used_where_it_is_installed(tmp_path: Path) -> None:
    assert packages.find_installer({"PATH": str(tmp_path)}) in (None, str(Path(sys.prefix, "bin", "uv")))
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\n")
    uv.chmod(0o755)
    assert packages.find_installer({"PATH": str(tmp_path)}) == str(uv)
    command = packages._command(tmp_path, ["x==1"], str(uv))
    assert command[:3] == [str(uv), "pip", "install"]
    assert command[-3:] == ["--python", f"{tmp_path}/bin/python", "x==1"]


def test_the_files_of_a_folder_are_there_before_the_code_is_loaded(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("some data")
    (tmp_path / "helper_in_folder.py").write_text("def text(): return 'from the folder'\n")
    found = run_replica("folder", {"working_dir": str(tmp_path)})
    assert (found["text"], found["data"]) == ("from the folder", "some data")
    assert Path(found["cwd"]).parent == cache
    assert found["is_held"]


def test_the_same_files_are_the_same_code(tmp_path: Path) -> None:
    def code() -> bytes:
        options: dict[str, Any] = {"actor_options": None, "config": None, "timeout_s": None}
        return make_spec("b", Facts, ("x",), {}, env={"working_dir": str(tmp_path)}, **options).code

    file = tmp_path / "a.py"
    file.write_text("one")
    before = code()
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").write_text("left out")
    file.touch()
    assert code() == before
    file.write_text("two")
    assert code() != before


def test_files_keep_their_modes_and_are_unpacked_once(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "run.sh").write_text("#!/bin/sh\n")
    (source / "run.sh").chmod(0o755)
    archive = working_dir.pack_folder(str(source)).archive
    folder = working_dir.unpack(archive, tmp_path / "cache")
    assert os.access(folder / "run.sh", os.X_OK)
    assert folder.stat().st_mode & 0o077 == 0
    (folder / "mark").touch()
    assert working_dir.unpack(archive, tmp_path / "cache") == folder
    assert (folder / "mark").exists()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [folder.name]


def test_folders_that_no_replica_has_used_for_long_are_deleted(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    names = {
        "old": "a" * 20,
        "old files": f"files-{'b' * 20}",
        "interrupted": "draft-xyz",
        "in use": "c" * 20,
        "recent": "d" * 20,
        "of others": "old-photos",
    }
    for what, name in names.items():
        (cache / name / "lib").mkdir(parents=True)
        age_s = (29 if what == "recent" else 31) * 86400
        now = cache.stat().st_mtime
        os.utime(cache / name, (now - age_s, now - age_s))
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(cache / names["in use"])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        (tmp_path / "source").mkdir()
        new = working_dir.unpack(working_dir.pack_folder(str(tmp_path / "source")).archive, cache)
        kept = {names["in use"], names["recent"], names["of others"], new.name}
        assert {path.name for path in cache.iterdir()} == kept
        holder.communicate()
    kept_folders.delete_unused(new, None)
    assert {path.name for path in cache.iterdir()} == kept
    kept_folders.delete_unused(new, 30)
    assert {path.name for path in cache.iterdir()} == kept - {names["in use"]}


def test_a_folder_that_is_used_again_stays(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    archive = working_dir.pack_folder(str(tmp_path / "source")).archive
    folder = working_dir.unpack(archive, tmp_path / "cache")
    os.utime(folder, (0, 0))
    working_dir.unpack(archive, tmp_path / "cache")
    new = tmp_path / "cache" / "new"
    new.mkdir()
    kept_folders.delete_unused(new, 30)
    assert folder.exists()


def test_an_archive_is_only_passed_on_outside_of_replicas(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one")
    packed = working_dir.pack_folder(str(tmp_path))
    here, path = os.getcwd(), list(sys.path)
    again = pickle.loads(pickle.dumps(packed, protocol=5))
    assert bytes(again.archive) == packed.archive
    assert (os.getcwd(), sys.path) == (here, path)


def test_a_zip_file_is_a_working_directory_too(tmp_path: Path) -> None:
    path = tmp_path / "code.zip"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("a.py", "one")
    for place in (str(path), f"file://{path}"):
        assert working_dir.pack_folder(place).archive == path.read_bytes()


def test_a_wrong_working_directory_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.zip").write_text("no archive")
    for place in ("/no/such/folder", str(tmp_path / "text.zip"), "nosuchprotocol://x"):
        with pytest.raises(BadRequestError, match="neither a folder nor a zip file"):
            working_dir.pack_folder(place)
    monkeypatch.setattr(working_dir, "MAX_BYTES", 5)
    for place in (tmp_path, tmp_path / "text.zip"):
        with pytest.raises(BadRequestError, match="the maximum"):
            working_dir.pack_folder(str(place))


def test_variables_alone_keep_the_workers_python() -> None:
    text = Environment(env_vars={"A": "1"}).to_text()
    found = asyncio.run(interpreter_of(text, {"B": "2"}))
    assert found.is_own
    assert found.variables == {"A": "1", "B": "2"}


def test_an_archive_that_grows_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("zeros", b"0" * 10_000)
    monkeypatch.setattr(working_dir, "MAX_UNPACKED_BYTES", 9_999)
    with pytest.raises(BadRequestError, match="have 10000 bytes when they are unpacked"):
        working_dir.unpack(path.read_bytes(), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
