"""The targets of `serve.run`: applications, builders and import paths."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel, ValidationError, v1
from tables import each_case

import daskserve as serve
from daskserve.client.definitions.targets import application_of
from daskserve.errors import BadRequestError


@serve.deployment
class Model:
    def __init__(self, value: Any = None) -> None:
        self.value = value

    def __call__(self) -> Any:
        return self.value


class Arguments(BaseModel):
    size: int
    name: str = "none"


def from_dict(args: dict[str, Any]) -> serve.Application:
    return Model.bind(args)


def from_model(args: Arguments) -> serve.Application:
    return Model.bind(args)


class OldArguments(v1.BaseModel):
    size: int


def from_old_model(args: OldArguments) -> serve.Application:
    return Model.bind(args)


def from_anything(args) -> serve.Application:  # type: ignore[no-untyped-def]
    return Model.bind(args)


BUILT = Model.bind()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> str:
    found = ModuleType("targets_of_a_test")
    vars(found).update(app=BUILT, builder=from_dict, model=Model, text="app")
    monkeypatch.setitem(sys.modules, found.__name__, found)
    return found.__name__


def test_an_application_is_itself() -> None:
    assert application_of(BUILT) is BUILT
    assert application_of(BUILT, {}) is BUILT


def test_a_builder_gets_its_arguments_as_a_dict_or_a_model() -> None:
    for builder in (from_dict, from_anything):
        assert application_of(builder, {"size": 3}).args == ({"size": 3},)
        assert application_of(builder).args == ({},)
    assert application_of(from_model, {"size": "3"}).args == (Arguments(size=3),)
    assert application_of(from_old_model, {"size": "3"}).args == (OldArguments(size=3),)


def test_the_models_own_error_is_raised() -> None:
    with pytest.raises(ValidationError, match="size"):
        application_of(from_model, {"size": "three"})
    with pytest.raises(v1.ValidationError, match="size"):
        application_of(from_old_model, {"size": "three"})


def test_an_import_path_names_an_application_or_a_builder(module: str) -> None:
    assert application_of(f"{module}:app") is BUILT
    assert application_of(f"{module}.app") is BUILT
    assert application_of(f"{module}:builder", {"a": 1}).args == ({"a": 1},)
    with pytest.raises(BadRequestError, match="has no 'missing'"):
        application_of(f"{module}:missing")
    with pytest.raises(TypeError, match="must name an application or a builder, not 'app'"):
        application_of(f"{module}:text")


def test_arguments_for_an_application_are_refused() -> None:
    with pytest.raises(BadRequestError, match=r"'Model' is already built, .* got \['a'\]"):
        application_of(BUILT, {"a": 1})


def local_annotation() -> Any:
    class Local(BaseModel):
        size: int

    def builder(args: Local) -> serve.Application:
        return Model.bind(args)

    return builder


def of_text(currency: str = "EUR") -> serve.Application:
    return Model.bind(currency)


class WSGIApp:
    def __call__(self, environ: Any, start_response: Any) -> list[bytes]:
        return []


@each_case(
    ("target", "match"),
    [
        (Model, r"got deployment 'Model', which is not bound: call its bind\(\)"),
        (3, "takes what .bind.. returns, an ASGI application, a function .* got 3"),
        (
            lambda environ, start_response: [],
            r"is a WSGI application; .* serve `a2wsgi.WSGIM",
        ),
        (WSGIApp(), r"WSGIApp object .* is a WSGI application; .* Wrap it"),
        (lambda: BUILT, r"exactly one parameter, for the dict of its arguments, but its signature is \(\)"),
        (lambda a, b: BUILT, r"exactly one parameter, .* but its signature is \(a, b\)"),
        (lambda *, a: BUILT, r"exactly one parameter, .* but its signature is \(\*, a\)"),
        (lambda **a: BUILT, r"exactly one parameter, .* but its signature is \(\*\*a\)"),
        (of_text, "gets a dict of all its arguments, but its parameter 'currency' is annotated as str"),
        (lambda args: Model, r"must return what .bind\(\) returns, .* which is not bound: call its bind"),
        (lambda args: 3, r"must return what .bind\(\) returns, or an ASGI application, got 3"),
        (local_annotation(), r"annotation 'Local' .* cannot be resolved"),
    ],
)
def test_a_wrong_target_is_a_type_error(target: Any, match: str) -> None:
    with pytest.raises(TypeError, match=match):
        application_of(target)


if TYPE_CHECKING:
    from nowhere import Nothing


def from_later(args: Later) -> Nothing:
    return Model.bind(args.size)


def from_nothing(args: Nothing) -> serve.Application:
    return Model.bind(args)


class Later(BaseModel):
    size: int


def test_the_annotation_of_a_builder_may_refer_to_what_comes_later_or_is_local() -> None:
    class Local(BaseModel):
        size: int

    def from_local(args: Local) -> Nothing:
        return Model.bind(args.size)

    for builder in (from_later, from_local):
        assert application_of(builder, {"size": 3}).args == (3,)
    with pytest.raises(TypeError, match="annotation 'Nothing' of application builder from_nothing cannot be"):
        application_of(from_nothing, {"size": 3})
