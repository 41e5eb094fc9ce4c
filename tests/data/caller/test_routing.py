"""Random choices: the backend, the shadows and the replica of a request."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import each_case

from daskserve.common.types import Envelope, EnvelopeKind
from daskserve.common.value_places import ValuePlaces
from daskserve.data.caller.choice import (
    Candidate,
    PlacedCandidate,
    TrafficPolicy,
    choose,
    nearest,
    shard_draw,
)
from daskserve.data.caller.routing.shadow import MAX_BEHIND_BYTES, Shadow, ShadowBudget
from daskserve.loops.tasks import TaskSet


@dataclass
class Replica(Candidate):
    name: str
    load: float = 0

    def score(self, now: float) -> float:
        return self.load


def three_sigma(count: int, share: float) -> float:
    return 3 * math.sqrt(count * share * (1 - share))


# ---- backends


@given(
    weights=st.dictionaries(st.text(max_size=3), st.floats(0, 1), min_size=1, max_size=6),
    number=st.floats(0, 1, exclude_max=True),
)
def test_every_number_draws_a_backend_with_weight(weights: dict[str, float], number: float) -> None:
    drawn = TrafficPolicy(weights, {}).draw(number)
    if any(weights.values()):
        assert drawn is not None
        assert weights[drawn] > 0
    else:
        assert drawn is None


def test_the_order_in_which_weights_are_given_makes_no_difference() -> None:
    one, two = TrafficPolicy({"a": 0.3, "b": 0.7}, {}), TrafficPolicy({"b": 0.7, "a": 0.3}, {})
    numbers = [number / 997 for number in range(997)]
    assert [one.draw(each) for each in numbers] == [two.draw(each) for each in numbers]


# ---- shard keys


def test_a_shard_key_draws_the_same_backend_in_every_process_and_every_time() -> None:
    policy = TrafficPolicy({"a": 0.5, "b": 0.5}, {})
    keys = [f"key-{number}" for number in range(20)]
    first = [policy.draw(shard_draw(key)) for key in keys]
    assert [policy.draw(shard_draw(key)) for key in keys] == first
    assert set(first) == {"a", "b"}
    # Fixed values, so that a change of the algorithm that moves all sessions is noticed.
    assert shard_draw("key-0") == pytest.approx(0.8356146, abs=1e-7)


@given(st.text(max_size=20))
def test_a_shard_key_draws_a_number_below_one(key: str) -> None:
    assert 0 <= shard_draw(key) < 1


def test_many_keys_are_split_by_weight() -> None:
    policy = TrafficPolicy({"a": 0.8, "b": 0.2}, {})
    drawn = Counter(policy.draw(shard_draw(f"user {number}")) for number in range(1000))
    assert abs(drawn["a"] - 800) <= three_sigma(1000, 0.8)


# ---- shadows


@each_case("proportion", [0.0, 0.1, 0.5, 1.0])
def test_shadows_get_their_proportion(proportion: float) -> None:
    policy = TrafficPolicy({"a": 1.0}, {"s": proportion})
    rng = random.Random(3)
    copies = sum(len(policy.shadows(rng)) for _ in range(1000))
    assert abs(copies - 1000 * proportion) <= three_sigma(1000, proportion)


async def test_a_shadow_that_has_ended_takes_no_room() -> None:
    async def fail(*_: Any) -> None:
        raise ConnectionError("gone")

    budget, whole = ShadowBudget(), {"type": "http.request", "body": bytes(MAX_BEHIND_BYTES + 1)}
    left_bytes, tasks = budget.left_bytes, TaskSet(logging.getLogger("test"))
    running, ended = (Shadow("s", Envelope(EnvelopeKind.HTTP, {}), fail, tasks, budget) for _ in range(2))
    running.put(whole)
    assert budget.left_bytes < left_bytes
    await asyncio.wait({running.task, ended.task})
    ended.put(whole)
    assert budget.left_bytes == left_bytes


def test_shadow_draws_are_independent() -> None:
    policy = TrafficPolicy({"a": 1.0}, {"s": 0.5, "t": 0.5})
    rng = random.Random(3)
    drawn = Counter(tuple(policy.shadows(rng)) for _ in range(1000))
    assert set(drawn) == {(), ("s",), ("t",), ("s", "t")}
    assert all(abs(count - 250) <= three_sigma(1000, 0.25) for count in drawn.values())
    assert policy.backends == {"a", "s", "t"}


# ---- replicas


def test_equally_loaded_replicas_share_requests() -> None:
    replicas = [Replica(str(number)) for number in range(4)]
    rng = random.Random(1)
    chosen = Counter(str(choose(replicas, 0, rng)) for _ in range(1000))
    assert len(chosen) == 4
    assert all(abs(count - 250) <= three_sigma(1000, 0.25) for count in chosen.values())


def test_the_busiest_of_many_is_never_chosen() -> None:
    """The other candidate always has fewer requests."""
    replicas = [Replica(str(number), load=number) for number in range(5)]
    rng = random.Random(1)
    chosen = Counter(choose(replicas, 0, rng).name for _ in range(1000))
    assert "4" not in chosen
    assert [name for name, _ in chosen.most_common()] == ["0", "1", "2", "3"]


def test_a_single_replica_needs_no_random_draw() -> None:
    class NoChance(random.Random):
        def random(self) -> float:
            raise AssertionError("nothing to draw")

    only = Replica("only")
    assert choose([only], 0, NoChance()) is only


# ---- where the values of a request are

MB = 10**6


@dataclass
class Placed(Replica, PlacedCandidate):
    pace_s: float = 0.01

    @property
    def worker(self) -> str:
        return self.name


@each_case(
    "replicas, held, total, expected",
    [
        # idle: where most of the bytes are, even if that is not all of them
        ("near 0 0.01, far 0 0.01", {"near": 100 * MB}, 100 * MB, {"near"}),
        ("more 0 0.01, less 0 0.01", {"more": 60 * MB, "less": 40 * MB}, 100 * MB, {"more"}),
        ("near 0 0.01, far 0 0.01", {"near": 1}, 1, {"near"}),
        # busy: what its requests take against what the transfer takes
        ("near 1 0.01, far 0 0.01", {"near": 100 * MB}, 100 * MB, {"near"}),
        ("near 1 1.00, far 0 1.00", {"near": 100 * MB}, 100 * MB, {"far"}),
        ("near 1 0.01, far 0 0.01", {"near": 1000}, 1000, {"far"}),
        ("near 9 0.0001, far 0 0.0001", {"near": 1000}, 1000, {"near"}),
        ("near 2 0.01, far 2 0.01", {"near": 1000}, 1000, {"near"}),
        # nothing is known of a replica that has not answered yet
        ("near 0 inf, far 0 0.01", {"near": 100 * MB}, 100 * MB, {"near"}),
        ("near 9 inf, far 0 inf", {"near": 100 * MB}, 100 * MB, {"far"}),
        # equal ones share the requests
        ("one 0 0.01, two 0 0.01", {"one": MB, "two": MB}, MB, {"one", "two"}),
        ("one 0 0.01, two 0 0.01, far 0 0.01", {"one": MB, "two": MB}, MB, {"one", "two"}),
        ("one 0 0.01, two 0 0.01", {"elsewhere": MB}, MB, {"one", "two"}),
    ],
)
def test_values_draw_their_request_unless_waiting_takes_longer_than_the_transfer(
    replicas: str, held: dict[str, int], total: int, expected: set[str]
) -> None:
    found = [each.split() for each in replicas.split(", ")]
    candidates = [Placed(name, float(load), float(pace_s)) for name, load, pace_s in found]
    rng = random.Random(1)
    drawn = {nearest(candidates, ValuePlaces(held, total), 0.0, rng).name for _ in range(40)}
    assert drawn == expected
