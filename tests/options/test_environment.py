"""Naming a Python environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tables import each_case

import daskserve as serve
from daskserve.client.definitions.specs import make_spec
from daskserve.errors import BadRequestError
from daskserve.options.environment import CondaEnv, Environment, parse_environment
from daskserve.options.specs import BackendSpec


@each_case(
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
    found = parse_environment(value)
    assert (None if found is None else found.to_text()) == expected


@each_case("value", [3, b"/env", ["x"], b"x"])
def test_any_other_type_is_a_type_error(value: Any) -> None:
    with pytest.raises(TypeError, match="env must be"):
        parse_environment(value)


@each_case("value", ["", " ", "./env", "envs/x", " x"])
def test_a_relative_path_or_an_invalid_name_is_a_value_error(value: str) -> None:
    with pytest.raises(ValueError, match="env"):
        parse_environment(value)


@each_case("name", ["", "/path/to/env", " x"])
def test_a_conda_environment_has_a_name(name: str) -> None:
    with pytest.raises(BadRequestError, match="not the name of a conda environment"):
        CondaEnv(name)
    with pytest.raises(TypeError):
        CondaEnv(None)  # type: ignore[arg-type]


@each_case(
    ("variables", "match"),
    [
        ({"A=B": "1"}, "'A=B' is not the name of an environment variable"),
        ({"": "1"}, "'' is not the name of an environment variable"),
        ({"A\0": "1"}, "is not the name of an environment variable"),
        ({"A": "secret\0"}, "the value of A contains a null character"),
    ],
)
def test_a_variable_that_no_process_can_have_is_refused(variables: dict[str, str], match: str) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        Environment(env_vars=variables)
    assert "secret" not in str(caught.value)


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


def test_an_environment_has_packages_variables_and_files(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("# models\nscikit-learn==1.5.2  # pinned\n\nnumpy\n")
    found = parse_environment({"pip": str(tmp_path / "requirements.txt"), "env_vars": {"A": "1"}})
    assert found is not None
    assert found.packages == ["scikit-learn==1.5.2", "numpy"]
    assert parse_environment({"uv": {"packages": ["x"]}}) == Environment(packages=["x"])
    assert Environment.from_text(found.to_text()) == found
    assert Environment.from_text("base") == Environment(python="base")
    with_both = Environment(python="base", env_vars={"A": "1"})
    assert Environment.from_text(with_both.to_text()) == with_both


@each_case(
    ("options", "text"),
    [
        ({"pip": "numpy"}, "'numpy' is neither a list of requirements nor a readable file"),
        ({"packages": ["x"], "conda": "base"}, "names another environment"),
        ({"packages": {"requirements": "x"}}, "must be a list of requirements"),
        ({"packages": [3]}, "packages"),
        ({"env_vars": {"A": 1}}, "env_vars"),
        ({"variables": {}}, "variables.*env_vars"),
        ({"venv": "envs/x"}, "absolute path"),
    ],
)
def test_wrong_options_of_an_environment_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){text}"):
        parse_environment(options)


def test_a_deployment_checks_its_environment_where_it_is_written() -> None:
    with pytest.raises(ValueError, match="nothing"):
        serve.deployment(env={"nothing": 1})(len)
