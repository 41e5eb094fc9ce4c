"""Which of the instances on a cluster a program finds."""

from __future__ import annotations

from typing import Any

import pytest
from tables import each_case

from daskserve.client.client import Client
from daskserve.client.functions import connecting, instances
from daskserve.client.functions.discovery import named_instance
from daskserve.client.functions.forms import Form
from daskserve.cluster.protocols.started import StartedInstances, common_instance
from daskserve.common.types import DEFAULT_INSTANCE
from daskserve.errors import AlreadyRunningError, BadRequestError, NotRunningError, UnavailableError
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
    with pytest.raises(BadRequestError, match=r"2 programs have separate instances.*: a, b. Choose one"):
        named_instance(running("a", "b"), None)
    assert named_instance(running("a", "b"), "b") == "b"
    assert named_instance(running("a", "b"), "c") is None


@each_case("here", [[], ["x"]])
def test_an_instance_of_another_program_does_not_count_as_started_here(
    here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Connection:
        """A connection to a cluster on which an instance of this name already runs."""

        owner_id = "me"
        started = StartedInstances(owner_id, lambda *_: None)  # type: ignore[arg-type, return-value]

        def runs_here(self) -> bool:
            return False

        def sync(self, coroutine: Any, *, timeout_s: float | None) -> Any:
            coroutine.close()
            raise AlreadyRunningError

    for name in here:
        Connection.started.add(name, is_owned=True)
    monkeypatch.setattr(connecting, "current_connection", Connection)
    with pytest.raises(AlreadyRunningError):
        finish(instances.start_with(Form(False, Client), HTTPOptions(), name="x"))
    assert Connection.started.latest == (here[0] if here else None)


# ---- the instances that a program has started


class Asked:
    """A supervisor that knows who owns which instance."""

    def __init__(self, **owners: str) -> None:
        self.owners = owners
        self.ended: list[str] = []
        self.error: Exception | None = None

    async def __call__(self, verb: str, **message: Any) -> Any:
        if self.error is not None:
            raise self.error
        if verb == "end_instance":
            self.ended.append(message["instance"])
            return True
        assert verb == "instances"
        return {name: {"owner": owner} for name, owner in self.owners.items()}


async def test_an_instance_is_alone_unless_another_program_owns_it() -> None:
    asked = Asked(a="me", b="another")
    started = StartedInstances("me", asked)
    assert [await started.is_alone(name) for name in ("a", "b", "ended")] == [True, False, True]
    asked.error = NotRunningError("there is no supervisor")
    assert await started.is_alone("b")
    asked.error = None
    started.cluster = object()
    assert await started.is_alone("b"), "its cluster ends with this program"


async def test_the_cluster_of_a_program_ends_after_its_last_instance() -> None:
    started = StartedInstances("me", Asked())
    cluster = started.cluster = object()
    assert (bool(started), started.latest) == (False, None)
    started.add("a", is_owned=True)
    started.add("b", is_owned=False)
    assert (bool(started), started.latest, "a" in started, "c" in started) == (True, "b", True, False)
    assert started.take_cluster() is None
    started.forget("b")
    started.forget("unknown")
    assert (started.latest, started.take_cluster()) == ("a", None)
    started.forget("a")
    assert (started.take_cluster(), started.take_cluster(), started.cluster) == (cluster, None, None)


async def test_the_instances_of_a_program_end_with_it_unless_they_are_shared() -> None:
    asked = Asked(a="me", b="another", c="me")
    started = StartedInstances("me", asked)
    for name, is_owned in (("a", True), ("b", True), ("c", False)):
        started.add(name, is_owned=is_owned)
    await started.end_owned()
    assert asked.ended == ["a"]
    asked.error = UnavailableError("the scheduler is gone")
    await started.end_owned()
