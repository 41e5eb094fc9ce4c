"""The replicas of requests that name a model, in virtual time."""

from __future__ import annotations

import asyncio
import bisect
import heapq
import itertools
import random
from collections.abc import Iterable
from typing import Any

import dask
import pytest
from tables import each_case

from daskserve.common.clock import LoopClock
from daskserve.common.types import Envelope, EnvelopeKind, Load
from daskserve.data.caller.pool.pooled_replica import PooledReplica
from daskserve.data.caller.pool.replica_pool import ReplicaPool
from daskserve.data.caller.routing.load_reports import LoadReports
from daskserve.data.caller.routing.multiplexing.demand import WINDOW, ModelDemand
from daskserve.data.caller.routing.multiplexing.model_routing import (
    ASSUMED_S,
    ModelRouting,
)
from daskserve.data.caller.routing.multiplexing.placement import hash_of
from daskserve.data.caller.routing.multiplexing.waiting import WaitingRequests, WatchFacts
from daskserve.data.multiplexing.cache import CachedModel, ModelCache

pytestmark = pytest.mark.smoke


class Backend:
    """The replicas of a backend and their models; a router chooses among them."""

    def __init__(self, replicas: int = 4, slots: int = 5, models: int = 8, rng: int = 1) -> None:
        self.rng = random.Random(rng)
        self.pool = ReplicaPool(lambda address: False)
        self.tags = [f"d#{number}" for number in range(replicas)]
        self.pool.update({tag: (f"w{tag}", 1) for tag in self.tags}, slots, str)
        self.routing = ModelRouting()
        self.now = 0.0
        self.capacity = models
        self.caches = {tag: ModelCache(models) for tag in self.tags}

    def take(self, model_id: str, since: float | None = None) -> PooledReplica | None:
        return self.pool.take(self.now, self.rng, self.routing.picker(model_id, self.now, since))

    def sent(self, model_id: str) -> str:
        """Send a request that ends at once; return its replica."""
        replica = self.take(model_id)
        assert replica is not None
        self.end(replica)
        return replica.tag

    def end(self, replica: PooledReplica) -> None:
        self.pool.report(replica, Load(replica.in_flight - 1), self.now)
        self.pool.release(replica)

    def publish(self, models: dict[str, Iterable[str]]) -> None:
        self.routing.update(
            {
                tag: {"loaded": list(models.get(tag, ())), "coming": [], "capacity": self.capacity}
                for tag in self.tags
            }
        )


def test_a_model_stays_with_its_replica_and_others_spread() -> None:
    backend = Backend()
    places = {model_id: backend.sent(model_id) for model_id in "abcdefgh"}
    assert sorted(places.values()) == sorted(backend.tags * 2)  # the fewest models first
    for model_id, tag in places.items():
        assert {backend.sent(model_id) for _ in range(5)} == {tag}


def test_published_models_replace_assumed_ones() -> None:
    backend = Backend()
    backend.publish({"d#3": ["a"]})
    assert backend.sent("a") == "d#3"
    first = backend.sent("b")
    backend.publish({tag: ["b"] if tag != first else [] for tag in backend.tags[:2]})
    assert backend.sent("b") in {first, *backend.tags[:2]}
    backend.now += ASSUMED_S + 1
    assert backend.sent("b") in set(backend.tags[:2]) - {first}
    backend.routing.update(None)


def test_assumed_models_take_room_only_until_the_assumption_ends() -> None:
    backend = Backend(replicas=2, models=3)
    backend.publish({"d#0": ["a", "b", "c"], "d#1": ["x"]})
    assert {backend.sent(model_id) for model_id in "abc"} == {"d#0"}
    backend.publish({"d#1": ["x"]})
    backend.now += ASSUMED_S + 1
    assert backend.sent("new") == "d#0"


def test_a_replica_that_has_a_model_is_preferred_to_one_that_loads_it() -> None:
    for having, loading in (("d#0", "d#1"), ("d#1", "d#0")):
        backend = Backend()
        backend.routing.update(
            {
                having: {"loaded": ["a"], "coming": [], "capacity": 8},
                loading: {"loaded": [], "coming": ["a"], "capacity": 8},
            }
        )
        assert backend.sent("a") == having


def test_all_processes_choose_alike() -> None:
    full = {tag: [f"{tag}{number}" for number in range(8)] for tag in Backend().tags}
    found = []
    for seed in range(2):
        backend = Backend(rng=seed)
        backend.publish(full)
        found.append([backend.sent(f"m{number}") for number in range(40)])
    assert found[0] == found[1]
    assert set(found[0]) == set(full)


def test_a_request_waits_for_a_slot_of_the_replica_that_has_its_model() -> None:
    backend = Backend(slots=1)
    for number in range(200):
        backend.sent(f"other{number % 50}")  # so that this model is not worth a copy
    first = backend.take("rare")
    assert first is not None
    assert backend.take("rare") is None
    assert backend.take("rare", since=backend.now - backend.routing.matching_timeout_s / 2) is None
    second = backend.take("rare", since=backend.now - backend.routing.matching_timeout_s)
    assert second is not None
    assert second is not first
    backend.end(first)
    backend.end(second)
    assert backend.sent("rare") in {first.tag, second.tag}


def test_a_model_that_everyone_wants_is_on_several_replicas_at_once() -> None:
    backend = Backend(slots=1)
    taken = [backend.take("popular") for _ in range(4)]
    assert {each.tag for each in taken if each is not None} == set(backend.tags)


def test_a_burst_of_a_rare_model_stays_on_its_replica() -> None:
    backend = Backend(slots=100)
    for number in range(1000):
        backend.sent(f"other{number % 50}")
    assert len({backend.take("rare").tag for _ in range(40)}) == 1  # type: ignore[union-attr]


def test_the_second_copy_is_left_to_others_once_it_is_not_needed() -> None:
    backend = Backend(slots=4)
    taken = [backend.take("popular") for _ in range(12)]
    places = {each.tag for each in taken if each is not None}
    assert len(places) > 1
    for each in taken:
        assert each is not None
        backend.end(each)
    assert len({backend.sent("popular") for _ in range(50)}) == 1


def test_a_replica_is_reported_once_for_each_model_that_it_is_about_to_load() -> None:
    received: list[str] = []
    routing = ModelRouting(received.append)
    for model_id in ("a", "a", "b"):
        routing.assume("d#0", model_id, 1.0)
    assert received == ["d#0", "d#0"]
    routing.update({"d#1": {"loaded": ["c"], "coming": ["d"], "capacity": 3}})
    for model_id in ("c", "d"):
        routing.assume("d#1", model_id, 1.0)
    assert received == ["d#0", "d#0"]


def test_how_long_a_request_waits_for_its_model_is_an_option() -> None:
    with dask.config.set({"daskserve.routing.model-matching-timeout-s": 7}):
        assert ModelRouting().matching_timeout_s == 7
    with dask.config.set({"daskserve.routing.model-matching-timeout-s": "soon"}):
        with pytest.raises(ValueError, match="model-matching-timeout-s: 'soon'"):
            ModelRouting()


async def test_a_router_of_an_option_gets_to_know_the_models() -> None:
    backend = Backend()
    watched: dict[str, Any] = {}
    waiting = waiting_of(backend, watched.__setitem__, ToldCluster())
    waiting.choose_by({"router": "RoundRobin"})
    replica = waiting.take(Envelope(EnvelopeKind.CALL, {}, model_id="a"))
    assert replica is not None
    models, now = waiting.models, LoopClock().now()
    assert models is not None
    assert [tag for tag in backend.tags if models.models_of(tag, now)] == [replica.tag]
    watched["models"]({replica.tag: {"loaded": ["b"], "coming": ["c"], "capacity": 3}})
    assert waiting.take(Envelope(EnvelopeKind.CALL, {}, model_id="a")) is not None
    assert waiting.routing is not None
    shown = {each.replica_id.unique_id: each.multiplexed_model_ids for each in waiting.routing._replicas}
    assert shown[replica.tag] == {"a", "b", "c"}
    assert waiting.take(Envelope(EnvelopeKind.CALL, {})) is not None
    waiting.close()


class ToldCluster:
    """Records the replicas that were reported to the controller."""

    is_ended = False

    def __init__(self) -> None:
        self.received: list[list[str]] = []

    async def controller(self) -> str:
        return "controller"

    async def call(self, controller: str, verb: str, replicas: list[str]) -> None:
        self.received.append(replicas)


def waiting_of(backend: Backend, watch: WatchFacts, cluster: Any) -> WaitingRequests:
    clock = LoopClock()
    reports = LoadReports(cluster, clock, {})
    return WaitingRequests("d", backend.pool, clock, backend.rng, watch, cluster, reports)


@each_case("is_closed", [False, True])
def test_the_controller_is_notified_of_models_that_load_until_the_backend_is_closed(is_closed: bool) -> None:
    async def tell() -> list[list[str]]:
        backend, cluster = Backend(), ToldCluster()
        waiting = waiting_of(backend, lambda kind, note: None, cluster)
        assert waiting.take(Envelope(EnvelopeKind.CALL, {}, model_id="a")) is not None
        (telling,) = asyncio.all_tasks() - {asyncio.current_task()}
        if is_closed:
            waiting.close()
        await asyncio.wait([telling])
        return cluster.received

    received = asyncio.run(tell())
    assert [len(each) for each in received] == ([] if is_closed else [1])


def test_demand_is_a_share_that_forgets() -> None:
    demand = ModelDemand()
    assert demand.share("a") == 0
    for _ in range(WINDOW):
        demand.note("a")
    assert demand.share("a") == 1
    for number in range(20 * WINDOW):
        demand.note(f"m{number}")
    assert demand.share("a") < 0.01
    assert len(demand._counts) <= 2 * WINDOW


def test_hashes_are_the_same_everywhere() -> None:
    assert hash_of("m1") == 15068896832674379348
    assert hash_of("\ud800")


class Load300:
    """Requests for 300 models by a Zipf distribution, and how many find their model loaded."""

    def __init__(self, backend: Backend, skew: float, rate: float) -> None:
        self.backend = backend
        self.rate = rate
        self.weights = [1 / (number + 1) ** skew for number in range(300)]
        self.bounds = list(itertools.accumulate(self.weights))
        self.names = [f"m{number}" for number in range(300)]
        backend.rng.shuffle(self.names)
        self.running: list[tuple[float, int, PooledReplica, CachedModel]] = []
        self.waiting: list[tuple[str, float]] = []
        self.numbers = itertools.count()
        self.requests = self.hits = 0

    def best(self) -> float:
        """Return the hit rate of the best placement of whole models, given all requests in advance."""
        places = len(self.backend.caches) * self.backend.capacity
        return sum(self.weights[:places]) / sum(self.weights)

    def run(self, count: int, warm: int) -> float:
        backend, rng, at, published_at = self.backend, self.backend.rng, 0.0, 0.0
        for number in range(count):
            at += rng.expovariate(self.rate)
            while self.running and self.running[0][0] <= at:
                backend.now, holder, replica, entry = heapq.heappop(self.running)
                entry.holders.discard(holder)
                backend.end(replica)
                self.waiting = [each for each in self.waiting if not self.serve(*each)]
            backend.now = at
            if at >= published_at:
                published_at = at + 1.0
                backend.publish({tag: cache.models for tag, cache in backend.caches.items()})
            if number == warm:
                self.requests = self.hits = 0
            model_id = self.names[bisect.bisect_left(self.bounds, rng.random() * self.bounds[-1])]
            if not self.serve(model_id):
                self.waiting.append((model_id, at))
        return self.hits / self.requests

    def serve(self, model_id: str, since: float | None = None) -> bool:
        backend = self.backend
        replica = backend.take(model_id, since)
        if replica is None:
            return False
        cache = backend.caches[replica.tag]
        entry = cache.use(model_id, backend.now)
        self.requests += 1
        self.hits += entry is not None
        seconds = 0.01 if entry is not None else 0.06
        if entry is None:
            entry = cache.expect(model_id, backend.now)
            for victim in cache.victims(entry) or ():
                cache.drop(victim)
                cache.left(victim)
            cache.admit(entry)
            cache.loaded(entry, model_id, 0)
        holder = next(self.numbers)
        entry.holders.add(holder)
        heapq.heappush(self.running, (backend.now + seconds, holder, replica, entry))
        return True


def test_300_models_on_4_replicas_of_8_are_found_nearly_as_often_as_is_possible() -> None:
    load = Load300(Backend(), 1.0, 40.0)
    assert load.run(4000, 2000) >= 0.9 * load.best()
    assert len(load.waiting) < 10


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("skew", "rate"), [(1.0, 40.0), (1.0, 100.0), (1.2, 100.0)])
def test_the_hit_rate_does_not_depend_on_the_seed(skew: float, rate: float, seed: int) -> None:
    load = Load300(Backend(rng=seed), skew, rate)
    assert load.run(12_000, 4000) >= 0.9 * load.best()
