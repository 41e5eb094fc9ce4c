"""Deployments and applications, before anything of them runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import daskserve as serve


@serve.deployment
class Echo:
    def __call__(self, value: Any) -> Any:
        return value


@serve.deployment
class Caller:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args

    def __call__(self, value: Any) -> Any:
        return value


@pytest.mark.parametrize(
    "bind",
    [
        lambda other: Caller.bind(other),
        lambda other: Caller.bind(1, echo=other),
        lambda other: Caller.bind([{"echo": (other,)}]),
    ],
)
@pytest.mark.parametrize("other", [Echo, Echo.bind()], ids=["deployment", "application"])
def test_another_deployment_as_an_argument_is_refused_at_once(bind: Callable[[Any], Any], other: Any) -> None:
    with pytest.raises(
        TypeError, match=r"'Caller' cannot have 'Echo' .* serve.connect\(\).get_handle\('Echo'\)"
    ):
        bind(other)


def test_other_arguments_are_kept_as_they_are() -> None:
    holds_itself: list[Any] = []
    holds_itself.append(holds_itself)
    application = Caller.bind(holds_itself, range(10**12), a={"b": "c"})
    assert application.args[0] is holds_itself
    assert application.kwargs == {"a": {"b": "c"}}
