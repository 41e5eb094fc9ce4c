"""Which of the instances on a cluster a program finds."""

from __future__ import annotations

from typing import Any

import pytest
from tables import each_case

from daskserve.client.client import Client
from daskserve.client.functions import connecting, instances
from daskserve.client.functions.finding import named_instance
from daskserve.client.functions.forms import Form
from daskserve.cluster.protocols.started import StartedInstances, common_instance
from daskserve.common.types import DEFAULT_INSTANCE
from daskserve.errors import AlreadyRunningError, BadRequestError
from daskserve.loops.blocking import finish
from daskserve.options.http import HTTPOptions


def running(*names: str, defaults: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    return {name: {"is_default": name in defaults} for name in names}


@each_case(
    ("found", "common", "named"),
    [
        (running(), None, None),
        (running("a"), None, "a"),
        (running("a", "b", "c", defaults=("b", "c")), "c", "c"),
        (running("a", DEFAULT_INSTANCE, "b", defaults=("b",)), DEFAULT_INSTANCE, DEFAULT_INSTANCE),
    ],
)
def test_an_instance_for_all_programs_comes_before_the_own_one_of_a_program(
    found: dict[str, Any], common: str | None, named: str | None
) -> None:
    assert common_instance(found) == common
    assert named_instance(found, None) == named


def test_one_of_several_own_instances_must_be_named() -> None:
    with pytest.raises(BadRequestError, match=r"2 programs have instances of their own.*: a, b. Name one"):
        named_instance(running("a", "b"), None)
    assert named_instance(running("a", "b"), "b") == "b"
    assert named_instance(running("a", "b"), "c") is None


@each_case("here", [[], ["x"]])
def test_an_instance_of_another_program_does_not_count_as_started_here(
    here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Connection:
        """A connection to a cluster on which an instance of the name runs already."""

        owner_id = "me"
        started = StartedInstances(owner_id, lambda *_: None)  # type: ignore[arg-type, return-value]

        def runs_here(self) -> bool:
            return False

        def sync(self, coroutine: Any, *, timeout_s: float | None) -> Any:
            coroutine.close()
            raise AlreadyRunningError

    for name in here:
        Connection.started.add(name, is_owned=True)
    monkeypatch.setattr(connecting, "present_connection", Connection)
    with pytest.raises(AlreadyRunningError):
        finish(instances.start_with(Form(False, Client), HTTPOptions(), name="x"))
    assert Connection.started.latest == (here[0] if here else None)
