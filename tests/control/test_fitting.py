"""The placement of bundles, compared with a search through all possible placements."""

from __future__ import annotations

import itertools
from typing import Any

from control_harness import worker
from hypothesis import given
from hypothesis import strategies as st
from tables import each_case

from daskserve.common.types import WorkerInfo
from daskserve.control.placement.cluster_demand import workers_needed
from daskserve.control.placement.placement import Demand, explain, place, room_for
from daskserve.control.records.state import State
from daskserve.options.placement import Strategy

STRATEGIES: list[Strategy] = ["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
workers_of = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 2), st.integers(1, 3)), min_size=1, max_size=4
).map(
    lambda found: [
        worker(n, threads=cpus, resources={"GPU": gpus}, host=f"h{host}")
        for n, (cpus, gpus, host) in enumerate(found, 1)
    ]
)
bundles_of = st.lists(
    st.sampled_from([{"CPU": 1.0}, {"CPU": 2.0}, {"GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}, {"CPU": 3.0}]),
    min_size=2,
    max_size=4,
)


def demand(strategy: Strategy, *bundles: dict[str, float], **more: Any) -> Demand:
    return Demand("b", bundles, strategy=strategy, **more)


def ways(workers: list[WorkerInfo], wanted: Demand) -> list[tuple[WorkerInfo, ...]]:
    """Return all possible placements of the bundles."""
    found = []
    for way in itertools.product(workers, repeat=len(wanted.bundles)):
        used: dict[str, dict[str, float]] = {}
        for each, amounts in zip(way, wanted.bundles, strict=True):
            here = used.setdefault(each.address, {"CPU": 0, "GPU": 0})
            for name, amount in amounts.items():
                here[name] += amount
        hosts = {each.host for each in way}
        fits = all(
            used[each.address]["CPU"] <= each.threads and used[each.address]["GPU"] <= each.resources["GPU"]
            for each in way
        )
        is_right = {"STRICT_PACK": len(hosts) == 1, "STRICT_SPREAD": len(hosts) == len(way)}
        if fits and is_right.get(wanted.strategy, True):
            found.append(way)
    return found


@given(workers=workers_of, bundles=bundles_of, strategy=st.sampled_from(STRATEGIES))
def test_bundles_are_placed_if_and_only_if_they_fit_together(
    workers: list[WorkerInfo], bundles: list[dict[str, float]], strategy: Strategy
) -> None:
    wanted = demand(strategy, *bundles)
    possible = [tuple(each.address for each in way) for way in ways(workers, wanted)]
    found = place(State(), workers, wanted)
    assert (found in possible) if possible else found is None
    assert room_for(State(), workers, wanted, 1) == bool(possible)
    if not possible:
        text = explain(State(), workers, wanted)
        assert text.startswith(f"the {len(bundles)} bundles of a placement group are reserved together")


@given(workers=workers_of, bundles=bundles_of, most=st.integers(1, 3))
def test_a_demand_with_room_for_several_copies_can_be_placed_as_often(
    workers: list[WorkerInfo], bundles: list[dict[str, float]], most: int
) -> None:
    wanted = demand("PACK", *bundles)
    count = room_for(State(), workers, wanted, most)
    assert not count or ways(workers, demand("PACK", *bundles[:1] * count))
    assert count <= most


SMALL = [worker(n, threads=2, host=f"h{(n + 1) // 2}") for n in (1, 2, 3, 4)]


@each_case(
    ("strategy", "bundles", "expected"),
    [
        ("PACK", [1, 1], ["w1", "w1"]),
        ("PACK", [1, 2], ["w2", "w1"]),  # the larger one chooses first
        ("PACK", [2, 1, 1, 2], ["w1", "w3", "w3", "w2"]),
        ("STRICT_PACK", [2, 2], ["w1", "w2"]),
        ("SPREAD", [1, 1], ["w1", "w3"]),  # another host, not only another worker
        ("SPREAD", [1, 1, 1, 1], ["w1", "w3", "w2", "w4"]),
        ("SPREAD", [1, 1, 1, 1, 1], ["w1", "w3", "w2", "w4", "w1"]),
        ("STRICT_SPREAD", [1, 1], ["w1", "w3"]),
        ("STRICT_PACK", [2, 2, 1], None),
        ("STRICT_SPREAD", [1, 1, 1], None),
    ],
)
def test_each_strategy_has_its_places(
    strategy: Strategy, bundles: list[int], expected: list[str] | None
) -> None:
    found = place(State(), SMALL, demand(strategy, *({"CPU": float(each)} for each in bundles)))
    assert (found and list(found)) == expected


def test_packed_bundles_prefer_the_worker_that_takes_most_of_them() -> None:
    workers = [worker(1, threads=1), worker(2, threads=1), worker(3, threads=3), worker(4, threads=2)]
    found = place(State(), workers, demand("PACK", *[{"CPU": 1.0}] * 5))
    assert found is not None
    assert sorted(found) == ["w3"] * 3 + ["w4"] * 2


def test_a_bundle_goes_back_where_it_leaves_no_room_for_another() -> None:
    """The first worker has room for either bundle, the second only for one of them."""
    workers = [worker(1, threads=4, resources={"GPU": 1.0}), worker(2, threads=4)]
    found = place(State(), workers, demand("STRICT_SPREAD", {"CPU": 4.0}, {"CPU": 1.0, "GPU": 1.0}))
    assert found is None  # both are on one host
    apart = [worker(1, threads=4, resources={"GPU": 1.0}, host="h1"), worker(2, threads=4, host="h2")]
    assert place(State(), apart, demand("STRICT_SPREAD", {"CPU": 4.0}, {"CPU": 1.0, "GPU": 0.1})) == (
        "w2",
        "w1",
    )


def test_packed_bundles_prefer_few_workers_and_then_few_hosts() -> None:
    sizes = [(3, "h1"), (2, "h2"), (2, "h3"), (2, "h1")]
    workers = [worker(n, threads=each, host=host) for n, (each, host) in enumerate(sizes, 1)]
    found = place(State(), workers, demand("PACK", *[{"CPU": 1.0}] * 7))
    assert found is not None
    assert sorted(found) == ["w1"] * 3 + ["w2"] * 2 + ["w4"] * 2
    workers[3] = worker(4, threads=1, host="h1")
    found = place(State(), workers, demand("PACK", *[{"CPU": 1.0}] * 5))
    assert found is not None
    assert sorted(found) == ["w1"] * 3 + ["w2"] * 2


def test_equal_bundles_go_elsewhere_for_another_one() -> None:
    workers = [worker(n, threads=2, resources={"GPU": 4.0 if n == 1 else 0.0}) for n in (1, 2, 3)]
    bundles = [{"CPU": 2.0}, {"CPU": 2.0}, {"CPU": 1.0, "GPU": 1.0}]
    found = place(State(), workers, demand("SPREAD", *bundles))
    assert found is not None
    assert (sorted(found[:2]), found[2]) == (["w2", "w3"], "w1")


def test_a_search_through_too_many_ways_is_given_up() -> None:
    """No worker has room for two of these bundles, and no two are equal: 30 of them have 30! placements."""
    workers = [worker(n, threads=8, host=f"h{n}") for n in range(1, 31)]
    bundles = [{"CPU": 5 + n / 100} for n in range(31)]
    assert place(State(), workers, demand("PACK", *bundles)) is None
    found = place(State(), workers, demand("PACK", *bundles[:30]))
    assert found is not None
    assert len(set(found)) == 30


@each_case(
    ("strategy", "bundles", "reason"),
    [
        (
            "STRICT_PACK",
            [2, 2, 1],
            "the 3 bundles of a placement group are reserved together on one host, and only 2 have room: "
            "together they need CPU 5 (most free on one host: 4)",
        ),
        (
            "STRICT_PACK",
            [1.5, 1.5, 1],
            "the 3 bundles of a placement group are reserved together on one host, and only 2 have room: "
            "no host has workers on which all of them fit",
        ),
        (
            "STRICT_SPREAD",
            [1, 1, 1],
            "the 3 bundles of a placement group are reserved together on different hosts, and only 2 have "
            "room: there are only 2 usable hosts",
        ),
        (
            "STRICT_SPREAD",
            [1, 3],
            "the 2 bundles of a placement group are reserved together on different hosts, and only 1 has "
            "room: a bundle needs CPU 3 (most free on one worker: 2); 2 workers were considered",
        ),
        (
            "PACK",
            [2, 2, 2, 2, 1],
            "the 5 bundles of a placement group are reserved together, and only 4 have room: a bundle needs "
            "CPU 1 (most free on one worker: 0); 4 workers were considered",
        ),
    ],
)
def test_the_reason_names_what_is_missing(strategy: Strategy, bundles: list[float], reason: str) -> None:
    assert explain(State(), SMALL, demand(strategy, *({"CPU": float(each)} for each in bundles))) == reason


def test_waiting_groups_need_as_many_workers_as_have_room_for_them() -> None:
    kinds = [worker(1, threads=2, host="h1"), worker(2, threads=2, host="h2")]
    pair = [{"CPU": 1.0}, {"CPU": 1.0}]
    assert workers_needed([demand("PACK", *pair)], kinds) == 1
    assert (
        workers_needed([demand("STRICT_PACK", {"CPU": 1.5}, {"CPU": 0.5}), *[demand("PACK", *pair)]], kinds)
        == 2
    )
    assert workers_needed([demand("STRICT_SPREAD", *pair)] * 2, kinds) == 2
    assert workers_needed([demand("STRICT_SPREAD", *pair)] * 3, kinds) == 4
    # Bundles of a spread group are on different hosts, bundles of another group may share one.
    assert (
        workers_needed([demand("PACK", {"CPU": 1.0}), demand("STRICT_SPREAD", *[{"CPU": 0.5}] * 2)], kinds)
        == 2
    )
    assert workers_needed([demand("STRICT_PACK", *[{"CPU": 0.6}] * 2)] * 3, kinds) == 3
    # The group is larger than one worker, but a host may have several workers.
    assert workers_needed([demand("STRICT_PACK", *pair, *pair)], kinds) == 2
    assert workers_needed([demand("PACK", {"CPU": 1.0}, {"CPU": 3.0})], kinds) == 0
    same_host = [worker(1, threads=2), worker(2, threads=2)]
    assert workers_needed([demand("STRICT_SPREAD", *pair)], same_host) == 0
