"""Facts about a replica that user code reads or reports: context, ranks, metadata, statistics."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import ranked_code as code
from replica_harness import call, make
from replica_starts import reconfiguration
from tables import case

import daskserve as serve
from daskserve.common.types import ReplicaRank
from daskserve.context import ReplicaContext
from daskserve.data.replica.replica import Replica
from daskserve.data.replica.user_code.recorded_stats import MOST_CHARACTERS, checked_plain
from daskserve.errors import NotInReplicaError, ReplicaStartError
from daskserve.payload import pickling
from daskserve.testing import local_instance

CONFIG = "config"
PICKLED = pickling.dump_bytes(CONFIG)


def play(
    definition: Any, scenario: Callable[[Replica, Any], Coroutine[Any, Any, None]], **options: Any
) -> None:
    """Run a scenario with a started replica and the facts of its start."""

    async def main() -> None:
        replica = make(definition, **options)
        async with asyncio.timeout(20):
            facts = await replica.start()
            try:
                await scenario(replica, facts)
            finally:
                await replica.stop(0)

    asyncio.run(main())


@pytest.mark.parametrize("place", ["thread", "process"])
def test_user_code_learns_who_it_is_and_of_every_change_of_its_rank(place: str) -> None:
    async def scenario(replica: Replica, facts: Any) -> None:
        found = await call(replica, "__call__")
        assert found == {
            "app_name": "default",
            "deployment": "b",
            "replica_tag": "b#AAAAAA",
            "unique_id": "b#AAAAAA",
            "code_version": "1",
            "object": "Ranked",
            "rank": ReplicaRank(0, 0, 0),
            "world_size": 1,
        }
        assert await call(replica, "on_loop") == found
        assert facts["rank_info"] == (0, 0, 0, 1)
        assert facts["metadata"] == {"address": "tcp://b#AAAAAA", "first": 0}
        received = reconfiguration(user_config=PICKLED, rank_info=(2, 1, 0, 5))
        await replica.reconfigure(**received)
        await replica.reconfigure(**received)  # known already
        await replica.reconfigure(**received | {"rank_info": (2, 1, 0, 6)})  # another number alone is no call
        found = await call(replica, "__call__")
        assert (found["rank"], found["world_size"]) == (ReplicaRank(2, 1, 0), 6)
        first, second = ReplicaRank(0, 0, 0), ReplicaRank(2, 1, 0)
        assert await call(replica, "history") == [("config", first, first), ("config", second, second)]
        assert await call(replica, "background") == [2]  # a thread that has run since the constructor
        with pytest.raises(ReplicaStartError, match="an unlucky rank"):
            await replica.reconfigure(**received | {"rank_info": (13, 0, 0, 14)})
        assert replica.health()["rank_info"] == (2, 1, 0, 6)
        assert (await call(replica, "__call__"))["rank"] == second

    play(code.Ranked, scenario, user_config=CONFIG, place=place)


@pytest.mark.parametrize("place", ["thread", "process"])
def test_routing_statistics_are_read_with_the_health_of_a_replica(place: str) -> None:
    async def scenario(replica: Replica, facts: Any) -> None:
        if place == "process":
            await replica.statistics()  # as the actor asks its child every second
        while "routing_stats" not in replica.health():
            await asyncio.sleep(0.01)
            if place == "process":
                await replica.statistics()
        assert replica.health()["routing_stats"] == {"asked": 1}
        assert replica.health()["routing_stats"] == {"asked": 1}  # not due again for 10 s

    play(code.Ranked, scenario, user_config=CONFIG, place=place)


def test_a_rank_goes_only_to_a_reconfigure_that_takes_one() -> None:
    async def scenario(replica: Replica, facts: Any) -> None:
        await replica.reconfigure(**reconfiguration(user_config=PICKLED, rank_info=(1, 0, 0, 2)))
        assert await call(replica, "history") == ["config"]
        assert (await call(replica, "__call__"))["rank"] == ReplicaRank(1, 0, 0)

    play(code.Unranked, scenario, user_config=CONFIG)


def test_an_async_reconfigure_gets_its_rank_by_keyword() -> None:
    async def scenario(replica: Replica, facts: Any) -> None:
        await replica.reconfigure(**reconfiguration(user_config=PICKLED, rank_info=(1, 0, 0, 2)))
        assert [each[1].rank for each in await call(replica, "history")] == [0, 1]

    play(code.AsyncRanked, scenario, user_config=CONFIG)


def test_without_a_user_config_reconfigure_is_not_called() -> None:
    async def scenario(replica: Replica, facts: Any) -> None:
        await replica.reconfigure(**reconfiguration(rank_info=(1, 0, 0, 2)))
        assert await call(replica, "history") == []

    play(code.Ranked, scenario)


class BadMetadata:
    answer: Any = None

    def record_replica_metadata(self) -> Any:
        return self.answer

    def __call__(self) -> None: ...


def test_metadata_that_cannot_be_sent_fails_the_start() -> None:
    for answer in [None, {"a": object()}, {1: 2}]:
        with case(answer):
            kind = type("Bad", (BadMetadata,), {"answer": answer})

            async def scenario(replica: Replica, facts: Any) -> None:
                raise AssertionError("it started")

            with pytest.raises(
                ReplicaStartError, match=r"failed in record_replica_metadata\(\): TypeError: it returned"
            ):
                play(kind, scenario)


def test_return_values_of_hooks_are_checked_in_the_replica() -> None:
    for answer, wrong in [
        ({"a": [1, None, {"b": 0.5}]}, ""),
        ([], "returned list; return a dict"),
        ({"a": 1 << 70}, "cannot be sent as JSON"),
        ({"a": "\ud800"}, "cannot be sent as JSON"),
        ({"a": b"bytes"}, "cannot be sent as JSON"),
        ({"a": "x" * MOST_CHARACTERS}, "4096 are allowed"),
    ]:
        with case(answer, wrong):
            values, problem = checked_plain(answer)
            assert (values == answer) == (not wrong)
            assert wrong in problem
            assert bool(problem) == bool(wrong)


def test_an_application_and_a_name_are_distinguished() -> None:
    context = ReplicaContext("i", "shop/cart", "shop/cart#ABCDEF")
    assert (context.app_name, context.deployment) == ("shop", "cart")
    assert (str(context.replica_id), context.replica_id.unique_id) == ("shop/cart#ABCDEF", "shop/cart#ABCDEF")


def test_outside_of_a_replica_the_error_says_where_to_call_it() -> None:
    with pytest.raises(RuntimeError, match="does not run in a daskserve replica") as caught:
        serve.get_replica_context()
    assert type(caught.value) is NotInReplicaError


class Clinging:
    """An object that something else refers to when its replica stops."""

    deleted: list[int] = []  # noqa: RUF012 (the test empties it)

    def __init__(self) -> None:
        self.me = self
        self.thread = threading.current_thread

    def __call__(self) -> int:
        return id(self)

    def __del__(self) -> None:
        self.deleted.append(1)


def test_a_destructor_runs_once_when_the_replica_stops_whoever_refers_to_the_object() -> None:
    held: list[Any] = []

    async def scenario(replica: Replica, facts: Any) -> None:
        context: Any = replica._code._servable.target  # type: ignore[attr-defined]
        held.append(context)
        assert Clinging.deleted == []

    Clinging.deleted.clear()
    play(Clinging, scenario)
    assert Clinging.deleted == [1]
    held[0].me = None
    held.clear()
    assert Clinging.deleted == [1]


def test_a_changed_health_check_acts_without_a_restart() -> None:
    class Frail:
        is_ill = False

        def check_health(self) -> None:
            if self.is_ill:
                raise RuntimeError("feverish")

        def fall_ill(self) -> None:
            self.is_ill = True

        def __call__(self) -> None: ...

    async def scenario(replica: Replica, facts: Any) -> None:
        await call(replica, "fall_ill")
        options = {"health_check_period_s": 0.01, "health_check_threshold": 2}
        await replica.reconfigure(**reconfiguration(**options))
        while replica.health()["is_healthy"]:  # noqa: ASYNC110 (health has no event)
            await asyncio.sleep(0.01)
        assert replica.health()["failures"] >= 2

    play(Frail, scenario, health_check_period_s=1000.0)


def test_replicas_of_an_instance_have_ranks_that_the_status_shows_and_a_rescale_changes() -> None:
    with local_instance(workers=2, http_options={"location": "NoServer"}) as client:
        options: dict[str, Any] = {"num_replicas": 3, "user_config": "one"}
        client.deploy("ranked", code.Ranked, config=options, version="1")
        replicas = client.status().replicas("ranked")
        assert sorted(each.rank for each in replicas if each.rank is not None) == [0, 1, 2]
        assert {each.metadata["address"] for each in replicas} == {f"tcp://{each.name}" for each in replicas}
        client.deploy("ranked", code.Ranked, config=options | {"num_replicas": 2}, version="1")
        after = client.status().replicas("ranked")
        assert {each.name for each in after} <= {each.name for each in replicas}
        assert sorted(each.rank for each in after if each.rank is not None) == [0, 1]
        handle = client.get_handle("ranked")
        assert {handle.remote().result(10)["world_size"] for _ in range(8)} == {2}

        async def choose() -> None:
            async with handle.choose_replica() as selection:
                assert selection.replica_metadata["address"] == f"tcp://{selection.replica_id}"

        asyncio.run(choose())


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_replica_has_the_name_that_its_program_gave(isolation: Any) -> None:
    def named(request: Any = None) -> str:
        return serve.get_replica_context().display_name

    with local_instance() as client:
        client.create_backend("classic", named, config={"isolation": isolation})
        client.create_endpoint("e", backend="classic")
        app = serve.deployment(named, name="d").options(isolation=isolation)
        handle = client.run(app.bind(), name="shop", route_prefix=None)
        assert client.get_handle("e").remote().result() == "backend 'classic'"
        assert handle.remote().result() == "deployment 'd' of application 'shop'"
