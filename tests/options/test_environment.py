"""Naming a Python environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from daskserve.client.specs import make_spec
from daskserve.errors import BadRequestError
from daskserve.options.backend_spec import BackendSpec
from daskserve.options.environment import CondaEnv, parse_environment


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


def spec(**options: Any) -> BackendSpec:
    return make_spec("b", len, (), {}, actor_options=None, timeout_s=None, **options)


def test_an_environment_implies_a_process() -> None:
    assert spec(config=None).env is None
    assert "isolation" not in spec(config=None).config.model_fields_set
    wanted = spec(config={"num_replicas": 2}, env=CondaEnv("x"))
    assert (wanted.env, wanted.config.isolation) == ("x", "process")


def test_an_environment_with_thread_isolation_is_refused() -> None:
    with pytest.raises(BadRequestError, match="isolation='thread'"):
        spec(config={"isolation": "thread"}, env="x")
