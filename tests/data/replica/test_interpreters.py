"""Finding the interpreter of a Python environment."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dask.config
import pytest
from tables import case

from daskserve.data.replica.environment.interpreters import find_interpreter, interpreter_of
from daskserve.data.replica.environment.packages import MARK, folder_of
from daskserve.errors import BadRequestError
from daskserve.options.environment import Environment, Interpreter


def make_environment(prefix: Path, *, is_conda: bool = True) -> Path:
    """Create a folder that looks like an environment."""
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin" / "python").symlink_to(sys.executable)
    if is_conda:
        (prefix / "conda-meta").mkdir()
    return prefix


def test_no_environment_means_that_of_the_worker() -> None:
    assert find_interpreter(None, {}) == Interpreter(sys.executable, sys.prefix)
    assert find_interpreter(sys.prefix, {}) == Interpreter(sys.executable, sys.prefix)


def test_a_path_selects_the_environment_as_if_activated(tmp_path: Path) -> None:
    prefix = make_environment(tmp_path / "venv", is_conda=False)
    variables = {
        "HOME": "/home",
        "PATH": "/usr/bin",
        "PYTHONPATH": "/of/the/worker",
        "PYTHONHOME": "/of/the/worker",
        "CONDA_PREFIX": "/of/the/worker",
    }
    found = find_interpreter(str(prefix), variables)
    assert found == Interpreter(
        python=str(prefix / "bin" / "python"),
        prefix=str(prefix),
        is_own=False,
        variables={"HOME": "/home", "PATH": f"{prefix}/bin:/usr/bin", "VIRTUAL_ENV": str(prefix)},
    )


def test_a_home_folder_is_expanded_on_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_environment(tmp_path / "venv", is_conda=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_interpreter("~/venv", {}).prefix == str(tmp_path / "venv")


def test_the_error_about_a_path_without_an_environment_names_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match=f"'{tmp_path}' is not the folder of an env.* no .*/bin/python"):
        find_interpreter(str(tmp_path), {})
    with pytest.raises(BadRequestError, match=f"'{tmp_path}/x' does not exist on {os.uname().nodename}"):
        find_interpreter(f"{tmp_path}/x", {})


def test_a_conda_environment_is_found_by_name(tmp_path: Path) -> None:
    make_environment(tmp_path)
    prefix = make_environment(tmp_path / "envs" / "x")
    for variables in [
        {"CONDA_EXE": "{root}/bin/conda"},
        {"MAMBA_ROOT_PREFIX": "{root}"},
        {"CONDA_PREFIX": "{root}"},
        {"CONDA_PREFIX": "{root}/envs/other"},
        {"CONDA_ENVS_PATH": "/nowhere:{root}/envs"},
        {"CONDA_ENVS_DIRS": "{root}/envs"},
    ]:
        with case(variables):
            environ = {name: value.format(root=tmp_path) for name, value in variables.items()}
            found = find_interpreter("x", environ)
            assert (found.python, found.is_own) == (f"{prefix}/bin/python", False)
            assert found.variables is not None
            assert (found.variables["CONDA_PREFIX"], found.variables["CONDA_DEFAULT_ENV"]) == (
                str(prefix),
                "x",
            )


def test_the_root_environment_is_found_by_its_names(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match="searched: nowhere, as CONDA_EXE and CONDA_PREFIX are not set"):
        find_interpreter("base", {})
    make_environment(tmp_path)
    for name in ("base", "root"):
        assert find_interpreter(name, {"CONDA_EXE": f"{tmp_path}/bin/conda"}).prefix == str(tmp_path)


def test_environments_elsewhere_are_found_in_the_list_of_conda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = make_environment(tmp_path / "far" / "away" / "x")
    (tmp_path / ".conda").mkdir()
    (tmp_path / ".conda" / "environments.txt").write_text(f"{tmp_path}\n{prefix}\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_interpreter("x", {}).prefix == str(prefix)


def test_the_error_about_an_unknown_conda_environment_lists_all_searched_places(tmp_path: Path) -> None:
    make_environment(tmp_path / "envs" / "x", is_conda=False)
    with pytest.raises(ValueError, match=f"no conda environment 'x' .* searched: .*{tmp_path}/envs/x"):
        find_interpreter("x", {"CONDA_EXE": f"{tmp_path}/bin/conda"})


# ---- as an option of a backend


async def test_installations_that_are_given_up_take_no_threads_of_the_worker(tmp_path: Path) -> None:
    text = Environment(packages=["some-package"]).to_text()
    folder = folder_of(["some-package"], tmp_path)
    folder.mkdir()
    (folder / MARK).touch()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    with (
        dask.config.set({"daskserve.process.environments-folder": str(tmp_path)}),
        open(tmp_path / f"{folder.name}.lock", "w") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)  # as if another process were installing the packages
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(interpreter_of(text, {}), 0.1)
        await asyncio.wait_for(asyncio.to_thread(len, ""), 10)
