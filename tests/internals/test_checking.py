"""If internals of a library are missing, one error says what to install."""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib import metadata

import pytest
from tables import each_case

from daskserve.errors import LibraryVersionError
from daskserve.internals.checking import PYTHON, Check, needs

pytestmark = pytest.mark.smoke


class Base:
    def __init__(self) -> None:
        self._here = 1


class Library(Base):
    def method(self, code: int, headers: str) -> str:
        return "LIBRARY_VARIABLE"


def _everything(check: Check) -> None:
    check.attributes(Library, "method")
    check.attributes(platform, "python_version")
    check.fields(Library, "_here")
    check.parameters(Library.method, "self", "code", "headers")
    check.constants(Library.method, "LIBRARY_VARIABLE")


def test_a_library_that_has_everything_passes() -> None:
    with needs("tornado", ">=6.4") as check:
        _everything(check)


def check_with(
    library: str, versions: str = ">=1", *, require: Callable[[Check], object] = lambda check: None
) -> None:
    with needs(library, versions) as check:
        require(check)


def import_from(module: str, name: str = "") -> Callable[[Check], None]:
    statement = f"from {module} import {name}" if name else f"import {module}"
    return lambda check: exec(statement)


@each_case(
    ("require", "missing"),
    [
        (lambda check: check.attributes(Library, "method", "_gone"), r"test_checking\.Library\._gone"),
        (lambda check: check.attributes(platform, "_gone"), r"platform\._gone"),
        (lambda check: check.fields(Library, "_here", "_gone"), r"test_checking\.Library\(\)\._gone"),
        (lambda check: check.parameters(Library.method, "self", "code"), r"Library\.method\(self, code\)"),
        (lambda check: check.parameters(Library.method, "self", "headers", "code"), r"headers, code\)"),
        (lambda check: check.constants(Library.method, "OTHER"), r"Library\.method with 'OTHER'"),
        (import_from("tornado.web", "gone"), r"cannot import name 'gone' from 'tornado\.web'"),
        (import_from("tornado.gone"), r"No module named 'tornado\.gone'"),
    ],
)
def test_missing_names_are_reported(require: Callable[[Check], None], missing: str) -> None:
    with pytest.raises(LibraryVersionError, match=missing):
        check_with("tornado", require=require)


def test_one_error_names_the_version_all_that_is_missing_and_the_remedy() -> None:
    def require(check: Check) -> None:
        check.attributes(Library, "_first")
        check.attributes(Library, "_second")

    with pytest.raises(LibraryVersionError) as caught:
        check_with("prometheus-client", ">=0.20,<0.99", require=require)
    installed = metadata.version("prometheus-client")
    assert str(caught.value) == (
        f"daskserve works with prometheus-client>=0.20,<0.99, but prometheus-client {installed} is "
        f"installed, which lacks {__name__}.Library._first; {__name__}.Library._second. "
        "Install a version in that range: pip install 'prometheus-client>=0.20,<0.99'."
    )
    assert vars(caught.value) == {
        "library": "prometheus-client",
        "installed": installed,
        "versions": ">=0.20,<0.99",
    }


def test_names_missing_in_the_standard_library_ask_for_another_python() -> None:
    remedy = r"lacks cannot import name 'gone' from 'asyncio'.*Run a Python in that range \(python>=1\)"
    with pytest.raises(LibraryVersionError, match=remedy) as caught:
        check_with(PYTHON, require=import_from("asyncio", "gone"))
    assert caught.value.installed == platform.python_version()


def test_a_library_that_is_not_installed_is_an_import_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        check_with("no-such-library", require=import_from("no_such_library"))


def test_missing_dependencies_of_a_library_are_import_errors() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        check_with("tornado", require=import_from("no_such_dependency"))


def test_other_errors_in_the_body_are_raised_as_they_are() -> None:
    with pytest.raises(ZeroDivisionError):
        check_with("tornado", require=lambda check: 1 / 0)
