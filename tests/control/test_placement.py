"""The worker that gets a replica, and the message if none has room."""

from __future__ import annotations

import itertools
from dataclasses import replace

from control_harness import replica, state_of, worker
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import each_case

from daskserve.common.types import WorkerInfo
from daskserve.control.observed.observed import Notes, Observed
from daskserve.control.placement.claims import claims
from daskserve.control.placement.cluster_demand import workers_needed
from daskserve.control.placement.placement import (
    Demand,
    ResourceUsage,
    TentativeUsage,
    capacity,
    explain,
    place,
    ranks,
    room_for,
)
from daskserve.control.records.records import ReplicaRecord
from daskserve.control.records.state import State

ONE = Demand("b", ({"CPU": 1.0},))
TENTH = Demand("b", ({"CPU": 0.1},))


def test_capacity_is_threads_memory_and_what_is_declared() -> None:
    found = capacity(worker(threads=3, memory_bytes=5, resources={"GPU": 2.0}))
    assert found == {"CPU": 3.0, "memory": 5.0, "GPU": 2.0}


def test_ten_tenths_fit_on_one_thread_and_an_eleventh_does_not() -> None:
    state = State()
    there = worker(threads=1)
    for number in range(10):
        assert place(state, [there], TENTH) == ("w1",)
        placed = replica(f"b#{number}")
        state.apply({placed.key: placed})
    assert place(state, [there], TENTH) is None


def test_room_is_what_is_declared_less_what_is_used() -> None:
    state = state_of(replica("b#1", demand={"CPU": 3.0}))
    assert place(state, [worker(1)], ONE) == ("w1",)
    assert place(state, [worker(1)], Demand("b", ({"CPU": 1.5},))) is None
    assert place(state, [worker(1)], Demand("b", ({"license": 1.0},))) is None


def test_resources_that_tasks_hold_are_not_free() -> None:
    gpu = Demand("b", ({"GPU": 1.0},))
    there = worker(resources={"GPU": 2.0}, taken_by_tasks={"GPU": 1.0})
    assert place(State(), [there], gpu) == ("w1",)
    state = state_of(replica("b#1", demand={"GPU": 1.0}))
    assert place(state, [there], gpu) is None
    assert "GPU 1 (most free on one worker: 0)" in explain(state, [there], gpu)


def test_a_report_of_what_tasks_hold_is_noted_for_each_worker() -> None:
    observed = Observed()
    observed.workers = {each.address: each for each in (worker(1), worker(2))}
    observed.notes["waits"] = Notes(waiting="no room")
    observed.notes["runs"] = Notes()
    assert observed.note_taken({"w1": {"GPU": 1.0}, "w2": {"GPU": 2.0}, "gone": {}}) == ["waits"]
    assert [each.taken_by_tasks for each in observed.workers.values()] == [{"GPU": 1.0}, {"GPU": 2.0}]


def test_waiting_replicas_claim_what_tasks_hold() -> None:
    gpu = Demand("b", ({"GPU": 1.0, "CPU": 1.0, "accelerator_type:A100": 0.001},))
    pair = Demand("c", ({"GPU": 1.0}, {"GPU": 1.0}), strategy="STRICT_PACK")
    has = {"resources": {"GPU": 2.0, "accelerator_type:A100": 1.0}, "taken_by_tasks": {"GPU": 2.0}}
    there = [worker(1, **has), worker(2, **has, is_available=False)]
    assert claims(State(), there, [gpu]) == {"w1": {"GPU": 1.0}}
    assert claims(State(), there, [gpu, gpu, gpu]) == {"w1": {"GPU": 2.0}}, "the third waits for replicas"
    assert claims(State(), there, [gpu, pair]) == {"w1": {"GPU": 1.0}}
    assert claims(State(), there, [pair, gpu]) == {"w1": {"GPU": 2.0}}
    assert not claims(State(), [worker(resources={"GPU": 1.0})], [pair]), "it does not wait for tasks"


def test_tasks_in_a_bundle_do_not_count_twice() -> None:
    group = {"demand": {"GPU": 1.0}, "bundles": ({"GPU": 1.0}, {"GPU": 2.0}), "bundle_workers": ("w1", "w1")}
    state = state_of(replica("a#1", **group))
    assert state.occupied.by_replicas == {"w1": {"GPU": 1.0}}
    one = Demand("b", ({"GPU": 1.0},))

    def has_room(taken: float, usage: ResourceUsage = state) -> bool:
        there = worker(resources={"GPU": 4.0}, taken_by_tasks={"GPU": taken})
        return place(usage, [there], one) is not None

    assert [has_room(taken) for taken in (1, 2, 3)] == [True, True, False]
    added = replica("b#1", demand={"GPU": 1.0})
    assert not has_room(1, TentativeUsage(state, {added.key: added}))


def test_the_scheduler_hears_of_whole_threads_and_of_resources() -> None:
    state = State()
    replicas = [replica(f"b#{n}", demand={"CPU": 0.3, "accelerator_type:A100": 0.001}) for n in range(7)]
    for number, each in enumerate(replicas):
        assert ("CPU" in state.occupied.by_replicas.get("w1", {})) == (number > 3)
        state.apply({each.key: each})
    gpu = replica("a#1", demand={"GPU": 0.5}, worker="w2")
    state.apply({gpu.key: gpu})
    assert state.occupied.by_replicas["w2"] == {"GPU": 0.5}
    state.apply({gpu.key: None, **{each.key: None for each in replicas[3:]}})
    assert not state.occupied.by_replicas
    state.apply({each.key: None for each in replicas})
    assert not state.occupied.used


@each_case("full", [1, 2])
def test_replicas_spread_even_if_the_other_worker_is_busier(full: int) -> None:
    """A worker with replicas of other backends is better than one with a replica of the same backend."""
    other = 3 - full
    state = state_of(
        replica("b#1", worker=f"w{full}"),
        *(replica(f"other#{n}", worker=f"w{other}") for n in range(5)),
    )
    assert place(state, [worker(1), worker(2)], ONE) == (f"w{other}",)


def test_workers_of_proxies_and_the_controller_are_taken_later() -> None:
    workers = [worker(1), worker(2)]
    assert place(State(), workers, ONE, avoid=["w1"]) == ("w2",)
    state = state_of(replica("b#1", worker="w2"))
    assert place(state, workers, ONE, avoid=["w1"]) == ("w1",)
    assert place(State(), workers, ONE, avoid=["w1", "w2"]) == ("w1",)


def test_many_deployments_use_the_worker_of_the_controller_too() -> None:
    workers, state, found = [worker(1), worker(2)], State(), []
    for number in range(10):
        (chosen,) = place(state, workers, Demand(f"d{number}", ({},)), avoid=["w1"]) or ()
        state.apply({f"replica/d{number}#1": replica(f"d{number}#1", worker=chosen, backend=f"d{number}")})
        found.append(chosen)
    assert found[:2] == ["w2", "w2"]
    assert found.count("w1") == 4


def test_the_emptier_worker_wins_then_the_smaller_address() -> None:
    workers = [worker(2), worker(1)]
    assert place(State(), workers, ONE) == ("w1",)
    assert place(state_of(replica("other#1", worker="w1")), workers, ONE) == ("w2",)


@each_case("allowed", ["w2", "name-2", "h2"])
def test_a_backend_may_be_limited_by_address_name_or_host(allowed: str) -> None:
    workers = [worker(1), worker(2, host="h2")]
    assert place(State(), workers, Demand("b", ({},), (allowed,))) == ("w2",)
    assert place(State(), workers[:1], Demand("b", ({},), (allowed,))) is None


def test_workers_that_are_paused_or_closing_get_nothing() -> None:
    assert place(State(), [worker(1, is_available=False)], ONE) is None
    assert place(State(), [worker(1, is_available=False), worker(2)], ONE) == ("w2",)


@given(
    amounts=st.dictionaries(st.sampled_from(["CPU", "GPU"]), st.floats(0, 5), max_size=2),
    used=st.lists(st.tuples(st.integers(1, 3), st.floats(0, 3)), max_size=6),
)
def test_a_worker_is_found_if_and_only_if_one_has_room(
    amounts: dict[str, float], used: list[tuple[int, float]]
) -> None:
    workers = [worker(n, resources={"GPU": 1.0} if n == 3 else {}) for n in (1, 2, 3)]
    state = state_of(*(replica(f"x#{i}", worker=f"w{n}", demand={"CPU": a}) for i, (n, a) in enumerate(used)))
    found = place(state, workers, Demand("b", (amounts,)))
    fits = {(each.address,) for each in workers if has_room(state, each, amounts)}
    assert (found in fits) if fits else found is None


def has_room(state: State, there: WorkerInfo, amounts: dict[str, float]) -> bool:
    used, offered = state.used(there.address), capacity(there)
    return all(used.get(name, 0) + each <= offered.get(name, 0) + 1e-9 for name, each in amounts.items())


def test_the_answer_does_not_depend_on_the_order_of_workers() -> None:
    state = state_of(replica("b#1", worker="w1"), replica("other#1", worker="w2"))
    answers = {place(state, order, ONE) for order in itertools.permutations([worker(n) for n in (1, 2, 3)])}
    assert answers == {("w3",)}


@settings(max_examples=40)
@given(
    loads=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4), st.integers(0, 2)), max_size=6),
    avoided=st.sets(st.integers(1, 6)),
    is_packed=st.booleans(),
    most_per_host=st.none() | st.just(2),
)
def test_no_worker_with_room_is_better_than_the_one_that_is_found(
    loads: list[tuple[int, int, int]], avoided: set[int], is_packed: bool, most_per_host: int | None
) -> None:
    """The search ends early. A load is a worker's threads, its other replicas, and those of the backend."""
    workers = [
        worker(n, threads=threads, host=f"h{n % 3}", is_available=others != 4)
        for n, (threads, others, _) in enumerate(loads, 1)
    ]
    replicas = [
        replica(f"{tag}#{n}.{each}", worker=f"w{n}", demand={"CPU": 0.5})
        for n, (_, others, own) in enumerate(loads, 1)
        for tag, count in (("other", others), ("b", own))
        for each in range(count)
    ]
    state, avoid = state_of(*replicas), {f"w{n}" for n in avoided}
    demand = Demand("b", ({"CPU": 0.5},), None, most_per_host, is_packed)
    rank = ranks(state, workers, demand, avoid)
    placed_at = {each.address for each in workers if room_for(state, workers, demand, 1, only=each.address)}
    best = min(placed_at, key=rank, default=None)
    assert place(state, workers, demand, avoid) == (None if best is None else (best,))


# ---- why not


def test_without_workers_it_says_so() -> None:
    assert explain(State(), [], ONE) == "the cluster has no workers that can hold replicas"


def test_it_names_the_only_workers_allowed() -> None:
    text = explain(State(), [worker(1)], Demand("b", ({},), ("gpu-2", "gpu-1")))
    assert "allows only gpu-1, gpu-2" in text


def test_it_says_that_all_are_paused() -> None:
    workers = [worker(1, is_available=False), worker(2, is_available=False), worker(3)]
    text = explain(State(), workers, Demand("b", ({},), ("w1", "w2")))
    assert text == "all 2 allowed workers are paused or closing"


def test_the_reason_contains_the_numbers() -> None:
    state = state_of(replica("b#1", demand={"CPU": 1.5}))
    text = explain(
        state, [worker(1), worker(2, threads=2)], Demand("b", ({"CPU": 3.0, "GPU": 1.0, "memory": 5.0},))
    )
    assert text == (
        "a replica needs CPU 3 (most free on one worker: 2.5), GPU 1 (most free on one worker: 0); "
        "2 workers were considered"
    )


def test_it_says_that_the_parts_are_there_but_not_together() -> None:
    workers = [worker(1, threads=8), worker(2, threads=1, resources={"GPU": 1.0})]
    text = explain(State(), workers, Demand("b", ({"CPU": 4.0, "GPU": 1.0},)))
    assert text == "no single one of 2 workers has all of CPU 4, GPU 1 free"


def test_waiting_replicas_need_as_many_workers_as_they_fill() -> None:
    kinds = [worker(1, threads=2), worker(2, threads=2)]
    assert workers_needed([], kinds) == 0
    assert workers_needed([ONE] * 5, kinds) == 3
    # Each needs a thread and a half, so each worker gets one, although the total would suffice for two.
    assert workers_needed([Demand("b", ({"CPU": 1.5},))] * 3, kinds) == 3
    # There are enough threads, but not enough memory.
    assert workers_needed([Demand("b", ({"CPU": 0.1, "memory": 0.6 * (1 << 30)},))] * 4, kinds) == 4


def test_small_replicas_fill_what_larger_ones_leave() -> None:
    kinds = [worker(1, threads=4)]
    large, small = Demand("large", ({"CPU": 3.0},)), Demand("small", ({"CPU": 0.1},))
    assert workers_needed([large, *[small] * 10, large, *[small] * 10], kinds) == 2
    assert workers_needed([large, *[small] * 11, large, *[small] * 10], kinds) == 3


def test_no_workers_are_requested_for_replicas_that_fit_on_none() -> None:
    kinds = [worker(1, threads=2), worker(2, threads=2, resources={"GPU": 1.0})]
    assert workers_needed([Demand("b", ({"CPU": 3.0},))] * 4, kinds) == 0
    assert workers_needed([Demand("b", ({"license": 1.0},))], kinds) == 0
    assert workers_needed([Demand("b", ({"GPU": 1.0},))] * 2, kinds) == 2
    assert workers_needed([Demand("b", ({"CPU": 1.0},), ("w1",))], kinds) == 0
    assert workers_needed([Demand("b", ({"CPU": 1.0},), ("h1",))], kinds) == 1


def test_without_any_workers_one_is_requested() -> None:
    assert workers_needed([ONE] * 5, []) == 1


def test_a_worker_without_a_memory_limit_has_room_for_any_memory() -> None:
    demand = Demand("b", ({"CPU": 1.0, "memory": 1e12},))
    kinds = [worker(1, threads=2, memory_bytes=0)]
    assert workers_needed([demand] * 3, kinds) == 2
    assert room_for(State(), kinds, demand, 5) == 2


def test_replicas_spread_over_hosts_before_a_host_gets_two() -> None:
    workers = [worker(1, host="h1"), worker(2, host="h1"), worker(3, host="h2")]
    assert place(state_of(replica("b#1", worker="w1")), workers, ONE) == ("w3",)


@each_case(
    ("records", "found"),
    [
        ([], "w1"),
        ([replica("b#1", worker="w2")], "w2"),
        ([replica("other#1", worker="w3")], "w3"),
        # Once the first worker is full, another worker of the same host.
        ([replica("b#1", worker="w1", demand={"CPU": 4.0}), replica("other#1", worker="w3")], "w2"),
    ],
)
def test_packed_replicas_fill_a_worker_and_then_its_host(records: list[ReplicaRecord], found: str) -> None:
    workers = [worker(1, host="h1"), worker(2, host="h1"), worker(3, host="h2")]
    assert place(state_of(*records), workers, replace(ONE, is_packed=True)) == (found,)


def test_a_host_gets_no_more_replicas_than_it_may_have() -> None:
    workers = [worker(1, host="h1"), worker(2, host="h1"), worker(3, host="h2"), worker(4, host="h3")]
    capped = replace(ONE, most_per_host=1)
    state = state_of(replica("b#1", worker="w1"), replica("other#1", worker="w3"))
    assert room_for(state, workers, capped, 9) == 2
    assert room_for(state, workers, capped, 9, only="w2") == 0
    assert room_for(state, workers, replace(ONE, most_per_host=3), 9, only="w2") == 2
    assert place(state, workers[:2], capped) is None
    assert place(state, workers[:3], capped) == ("w3",)
    text = explain(state, workers[:2], capped)
    assert text == "max_replicas_per_node is 1, and each of the 1 usable hosts has as many"
    assert "needs license 1" in explain(state, workers, replace(capped, bundles=({"license": 1.0},)))


def test_more_workers_help_a_capped_backend_only_if_they_are_on_other_hosts() -> None:
    capped = [replace(ONE, most_per_host=2)] * 5
    assert workers_needed(capped, [worker(1, host="h1"), worker(2, host="h2")]) == 3
    assert workers_needed(capped, [worker(1), worker(2)]) == 0
    assert workers_needed([*capped, Demand("other", ({"CPU": 1.0},))], [worker(1), worker(2)]) == 1


def test_workers_that_are_kept_for_the_controller_get_no_replicas() -> None:
    kept, other = worker(1, is_system=True), worker(2)
    assert place(State(), [kept, other], TENTH) == ("w2",)
    assert place(State(), [kept], TENTH) is None
    assert place(State(), [kept, other], Demand("b", ({"CPU": 3.0}, {"CPU": 3.0}))) is None
    assert room_for(State(), [kept, other], ONE, 100) == 4
    assert explain(State(), [kept], TENTH) == (
        "system_workers keeps all 1 worker for the controller and the proxies; start others for replicas"
    )
    assert "1 worker was considered" in explain(State(), [kept, other], Demand("b", ({"CPU": 9.0},)))
    assert workers_needed([ONE], [kept]) == 1
    assert workers_needed([Demand("b", ({"CPU": 9.0},))], [worker(1, threads=9, is_system=True), other]) == 0


@each_case("name", ["w1", "h1", "name-1", "system"])
def test_a_worker_is_named_by_its_address_name_host_or_resource(name: str) -> None:
    known = worker(1, resources={"system": 1.0})
    assert known.matches(["other", name])
    assert not known.matches(["other"])
    assert not known.matches([])
