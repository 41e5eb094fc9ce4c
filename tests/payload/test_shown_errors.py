"""Errors as users see them: with the user's frames, and with other frames only on request."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.config
import pytest

from daskserve.errors import ClosedError, InstanceError, RemoteTraceback, ReplicaStartError
from daskserve.payload.shown_errors import MAX_LINES, shortened, shown, users_frames


def module(name: str, source: str, **names: Any) -> dict[str, Any]:
    """Return the names that a module of this name defines."""
    found = {"__name__": name, **names}
    exec(compile(source, f"{name}.py", "exec"), found)
    return found


def raised(error: Exception, *path: str) -> Exception:
    """Return an error as it arrives from a call through modules of the given names, the outermost first."""

    def fail() -> None:
        raise error

    call: Callable[[], None] = module(path[-1], "def call():\n    raise error", error=error)["call"]
    for name in reversed(path[:-1]):
        call = module(name, "def call():\n    inner()", inner=call)["call"]
    try:
        call()
    except Exception as found:
        found.__traceback__ = None if found.__traceback__ is None else found.__traceback__.tb_next
        return found
    raise AssertionError


def files(error: BaseException) -> list[str]:
    return [each.filename for each in traceback.extract_tb(error.__traceback__)]


OURS, WAY = "daskserve.client.x", "concurrent.futures"


@pytest.mark.parametrize(
    ("error", "path", "left"),
    [
        (ClosedError("gone"), ["shop", OURS, WAY, OURS], ["shop"]),
        (ClosedError("gone"), ["asyncio.runners", "shop", OURS], ["asyncio.runners", "shop"]),
        # A user's builder, which daskserve calls.
        (KeyError("size"), ["main", OURS, "importlib", "shop"], ["main", "shop"]),
        (KeyError("size"), ["main", OURS, "shop", "pydantic.main"], ["main", "shop"]),
        # An error of a check in daskserve shows where it was raised, in case the check is wrong.
        (TypeError("no target"), ["main", OURS, OURS], ["main", OURS]),
        # A mistake in daskserve.
        (AttributeError("x"), ["main", OURS, WAY, OURS], ["main", OURS, WAY, OURS]),
        (ValueError("user's own"), ["main", "shop"], ["main", "shop"]),
    ],
)
def test_frames_of_daskserve_are_left_out(error: Exception, path: list[str], left: list[str]) -> None:
    found = raised(error, *path)
    found.__traceback__ = users_frames(found)
    assert files(found) == [f"{each}.py" for each in left]


def test_an_error_that_came_from_another_process_has_no_frames_of_daskserve() -> None:
    error = raised(FileNotFoundError("weights"), "main", OURS)
    error.__cause__ = RemoteTraceback("Traceback")
    error.__traceback__ = users_frames(error)
    assert files(error) == ["main.py"]


def test_the_users_traceback_is_the_cause_once() -> None:
    error = raised(ReplicaStartError("Deployment 'x' failed", user_traceback="Traceback\n  shop.py\n"), OURS)
    assert shown(error) is error
    assert shown(error) is error
    text = "".join(traceback.format_exception(error))
    assert text.count("shop.py") == 1
    assert OURS not in text


def test_causes_without_frames_of_the_user_are_left_out() -> None:
    error = raised(ClosedError("gone"), "main", OURS)
    error.__cause__ = raised(InstanceError("inner"), OURS, OURS)
    assert shown(error).__cause__ is None
    error.__cause__ = raised(KeyError("inner"), OURS, "shop")
    assert files(shown(error).__cause__ or error) == ["shop.py"]


def test_an_error_ends_with_the_address_of_its_section() -> None:
    with dask.config.set({"daskserve.errors.site": "https://docs.example.org/"}):
        error = shown(shown(ClosedError("gone")))
    assert error.__notes__ == ["See https://docs.example.org/errors.html#closederror"]
    page = Path(__file__).parents[2] / "docs/errors.md"
    assert '<a id="closederror"></a>' in page.read_text(encoding="utf-8")
    assert not hasattr(shown(ClosedError("gone")), "__notes__")


def test_all_frames_stay_if_asked_for() -> None:
    error = raised(ClosedError("gone"), "main", OURS)
    with dask.config.set({"daskserve.errors.full-tracebacks": True}):
        assert files(shown(error)) == ["main.py", f"{OURS}.py"]
    with (
        dask.config.set({"daskserve.errors.full-traceback": True}),
        pytest.raises(ValueError, match="full_traceback, which is not an option"),
    ):
        shown(error)


@pytest.mark.parametrize("count", [0, 1, MAX_LINES, MAX_LINES + 1, 100])
def test_a_long_traceback_keeps_its_ends(count: int) -> None:
    lines = [f"line {number}" for number in range(count)]
    found = shortened("\n".join(lines) + "\n").splitlines()
    assert len(found) == min(count, MAX_LINES)
    assert found[:1] + found[-1:] == lines[:1] + lines[-1:]
    left_out = count - len(found) + 1
    assert (f"  ... {left_out} lines ..." in found) is (count > MAX_LINES)
