"""Python environments of replicas: valid names, and finding the interpreter."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from daskserve.client.wishes import make_wish
from daskserve.errors import BadRequestError
from daskserve.options.environment import CondaEnv, Interpreter, find_interpreter, parse_environment


def make_environment(prefix: Path, *, is_conda: bool = True) -> Path:
    """Create a folder that looks like an environment."""
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin" / "python").symlink_to(sys.executable)
    if is_conda:
        (prefix / "conda-meta").mkdir()
    return prefix


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (CondaEnv("x"), "x"),
        (CondaEnv(name="x.y-1"), "x.y-1"),
        ("x", "x"),
        ("/path/to/env", "/path/to/env"),
        ("~/env", "~/env"),
        (Path("/path/to/env"), "/path/to/env"),
    ],
)
def test_an_environment_is_a_name_or_an_absolute_path(value: Any, expected: str | None) -> None:
    assert parse_environment(value) == expected


@pytest.mark.parametrize("value", [3, b"/env", ["x"], b"x"])
def test_any_other_type_is_a_type_error(value: Any) -> None:
    with pytest.raises(TypeError, match="env must be"):
        parse_environment(value)


@pytest.mark.parametrize("value", ["", " ", "./env", "envs/x", " x"])
def test_a_relative_path_or_an_invalid_name_is_a_value_error(value: str) -> None:
    with pytest.raises(ValueError, match="env"):
        parse_environment(value)


@pytest.mark.parametrize("name", ["", "/path/to/env", " x"])
def test_a_conda_environment_has_a_name(name: str) -> None:
    with pytest.raises(BadRequestError, match="not the name of a conda environment"):
        CondaEnv(name)
    with pytest.raises(TypeError):
        CondaEnv(None)  # type: ignore[arg-type]


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


@pytest.mark.parametrize(
    "variables",
    [
        {"CONDA_EXE": "{root}/bin/conda"},
        {"MAMBA_ROOT_PREFIX": "{root}"},
        {"CONDA_PREFIX": "{root}"},
        {"CONDA_PREFIX": "{root}/envs/other"},
        {"CONDA_ENVS_PATH": "/nowhere:{root}/envs"},
        {"CONDA_ENVS_DIRS": "{root}/envs"},
    ],
)
def test_a_conda_environment_is_found_by_name(tmp_path: Path, variables: dict[str, str]) -> None:
    make_environment(tmp_path)
    prefix = make_environment(tmp_path / "envs" / "x")
    environ = {name: value.format(root=tmp_path) for name, value in variables.items()}
    found = find_interpreter("x", environ)
    assert (found.python, found.is_own) == (f"{prefix}/bin/python", False)
    assert found.variables is not None
    assert (found.variables["CONDA_PREFIX"], found.variables["CONDA_DEFAULT_ENV"]) == (str(prefix), "x")


def test_the_root_environment_is_found_by_its_names(tmp_path: Path) -> None:
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
    with pytest.raises(ValueError, match=f"no conda environment 'x' .* looked for: .*{tmp_path}/envs/x"):
        find_interpreter("x", {"CONDA_EXE": f"{tmp_path}/bin/conda"})


# ---- as an option of a backend


def spec(**options: Any) -> dict[str, Any]:
    return make_wish("b", len, (), {}, actor_options=None, timeout_s=None, **options)


def test_an_environment_implies_a_process() -> None:
    assert spec(config=None)["env"] is None
    assert "isolation" not in spec(config=None)["config"]
    wanted = spec(config={"num_replicas": 2}, env=CondaEnv("x"))
    assert (wanted["env"], wanted["config"]["isolation"]) == ("x", "process")


def test_an_environment_with_thread_isolation_is_refused() -> None:
    with pytest.raises(BadRequestError, match="isolation='thread'"):
        spec(config={"isolation": "thread"}, env="x")
