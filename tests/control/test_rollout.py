"""Rollouts to another version or number of replicas: each step is safe, and the rollout ends."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from control_harness import replica
from hypothesis import given
from hypothesis import strategies as st

from daskserve.common.types import ReplicaState as S
from daskserve.control.backend import rollout
from daskserve.control.backend.rollout import Steps
from daskserve.control.observed.lifecycle import STOP_ORDER, WANTED_STATES
from daskserve.control.placement.eviction_order import EvictionCriteria
from daskserve.control.records.records import ReplicaRecord

next_steps = partial(rollout.next_steps, max_surge=1, max_unavailable=0)


def some(version: str, *states: S) -> list[ReplicaRecord]:
    return [replica(f"b#{version}-{number}", state, version=version) for number, state in enumerate(states)]


def live(replicas: list[ReplicaRecord]) -> list[ReplicaRecord]:
    return [each for each in replicas if each.state in WANTED_STATES]


def serving(replicas: list[ReplicaRecord]) -> int:
    return sum(each.state is S.RUNNING for each in replicas)


def take(replicas: list[ReplicaRecord], steps: Steps, version: str, mark: str) -> list[ReplicaRecord]:
    """Apply the steps: stopped replicas are removed; new ones exist, but do not run yet."""
    stopped = {each.tag for each in steps.stop}
    fresh = [replica(f"b#{mark}-{number}", S.SHOULD_START, version=version) for number in range(steps.start)]
    return [each for each in replicas if each.tag not in stopped] + fresh


replica_lists = st.lists(
    st.tuples(st.sampled_from(["v1", "v2", "v3"]), st.sampled_from([*S])), max_size=8
).map(lambda pairs: [replica(f"b#{n}", state, version=version) for n, (version, state) in enumerate(pairs)])


@given(wanted=st.integers(0, 6), replicas=replica_lists, surge=st.integers(0, 3), missing=st.integers(0, 3))
def test_no_step_goes_below_what_must_run_or_above_the_surge(
    wanted: int, replicas: list[ReplicaRecord], surge: int, missing: int
) -> None:
    steps = next_steps(wanted, "v3", replicas, max_surge=surge, max_unavailable=missing)
    after = take(replicas, steps, "v3", "new")
    assert steps.start >= 0
    assert len({each.tag for each in steps.stop}) == len(steps.stop)
    assert {each.state for each in steps.stop} <= WANTED_STATES
    is_update = any(each.version != "v3" for each in live(replicas))
    assert serving(after) >= min(wanted - missing * is_update, serving(replicas))
    if steps.start:
        assert len(live(after)) <= wanted + surge


@given(
    wanted=st.integers(0, 5),
    replicas=replica_lists,
    pace=st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(any),
    luck=st.lists(st.sampled_from(["run one", "run all", "lose one", "fail one", "nothing"]), max_size=30),
)
def test_it_converges_whatever_happens_on_the_way(
    wanted: int, replicas: list[ReplicaRecord], pace: tuple[int, int], luck: list[str]
) -> None:
    """Starts fail and workers are lost for a while. Afterwards exactly the wanted replicas run."""
    surge, missing = pace
    bound = max(wanted + surge, len(live(replicas)))
    for turn in range(len(luck) + 3 * (wanted + len(replicas) + 2)):
        steps = next_steps(wanted, "v3", replicas, max_surge=surge, max_unavailable=missing)
        served = serving(replicas)
        replicas = live(take(replicas, steps, "v3", str(turn)))
        assert len(replicas) <= bound
        assert serving(replicas) >= min(wanted - missing, served)
        idle = [each for each in replicas if each.state is not S.RUNNING]
        event = luck[turn] if turn < len(luck) else "run all"
        if event == "lose one" and replicas:
            replicas = replicas[1:]
        elif event == "fail one" and idle:
            replicas = [each for each in replicas if each is not idle[0]]
        elif event in ("run one", "run all"):
            started = idle[:1] if event == "run one" else idle
            replicas = [replace(each, state=S.RUNNING) if each in started else each for each in replicas]
    assert [(each.version, each.state) for each in replicas] == [("v3", S.RUNNING)] * wanted
    assert next_steps(wanted, "v3", replicas, max_surge=surge) == Steps(0, ())


def test_scaling_down_gives_up_those_that_do_least_and_the_youngest_of_them() -> None:
    replicas = some("v1", S.RUNNING, S.RUNNING, S.SHOULD_START, S.STARTING, S.STARTING)
    order = [next_steps(5 - count, "v1", replicas).stop[-1].tag[-1] for count in range(1, 6)]
    assert order == ["2", "4", "3", "1", "0"]
    states = [next_steps(5 - count, "v1", replicas).stop[-1].state for count in range(1, 6)]
    assert states == sorted(states, key=STOP_ORDER.index)


def test_a_new_version_starts_before_an_old_one_is_given_up() -> None:
    old = some("v1", S.RUNNING, S.RUNNING)
    assert next_steps(2, "v2", old) == Steps(1, ())
    new = some("v2", S.STARTING)
    assert next_steps(2, "v2", [*old, *new]) == Steps(0, ())
    new = some("v2", S.RUNNING)
    assert next_steps(2, "v2", [*old, *new]) == Steps(1, (old[0],))


def test_old_replicas_that_never_ran_are_given_up_at_once() -> None:
    old = some("v1", S.SHOULD_START, S.STARTING, S.RUNNING)
    steps = next_steps(3, "v2", old)
    assert list(steps.stop) == old[:2]
    assert steps.start == 3


def test_replicas_on_their_way_out_count_for_nothing() -> None:
    leaving = some("v1", S.SHOULD_STOP, S.STOPPING)
    assert next_steps(1, "v1", leaving) == Steps(1, ())
    assert next_steps(0, "v1", leaving) == Steps(0, ())


def test_scaling_down_in_the_middle_of_a_rollout_keeps_what_serves() -> None:
    """Two replicas start while an old one serves. If one is wanted, the old one stays until one runs."""
    old, new = some("v1", S.RUNNING), some("v2", S.STARTING, S.STARTING)
    steps = next_steps(1, "v2", [*old, *new])
    assert steps == Steps(0, (new[1],))


def spread(*workers: str) -> list[ReplicaRecord]:
    return [replica(f"b#{number}", worker=worker) for number, worker in enumerate(workers)]


def stopped(wanted: int, replicas: list[ReplicaRecord], criteria: EvictionCriteria) -> list[str]:
    return [each.tag for each in next_steps(wanted, "v1", replicas, criteria=criteria).stop]


def test_scaling_down_keeps_replicas_spread_and_the_busy_ones_last() -> None:
    replicas = spread("w1", "w1", "w1", "w2", "w3", "w3")
    criteria = EvictionCriteria(ongoing={"b#0": 5.0, "b#4": 5.0})
    assert stopped(3, replicas, criteria) == ["b#2", "b#5", "b#1"]
    assert stopped(2, replicas, criteria) == ["b#2", "b#5", "b#1", "b#3"]


def test_where_workers_are_given_back_the_emptiest_are_emptied_first() -> None:
    replicas = spread("w1", "w1", "w2", "w2", "w3")
    held = {"w1": 0, "w2": 3, "w3": 1}
    criteria = EvictionCriteria(others=held.__getitem__, empties_workers=True)
    assert stopped(2, replicas, criteria) == ["b#1", "b#0", "b#4"]


def test_starting_replicas_stop_before_running_ones_on_any_worker() -> None:
    replicas = [*spread("w1", "w1"), replica("b#9", S.STARTING, worker="w2")]
    assert stopped(2, replicas, EvictionCriteria()) == ["b#9"]


@given(
    st.lists(st.tuples(st.sampled_from("xyz"), st.sampled_from(STOP_ORDER), st.integers(0, 3)), max_size=12),
    st.integers(0, 12),
    st.booleans(),
)
def test_replicas_to_stop_are_chosen_one_at_a_time(
    given_replicas: list[tuple[str, S, int]], wanted: int, empties_workers: bool
) -> None:
    held = {"x": 0, "y": 2, "z": 1}
    replicas = [
        replica(f"b#{number}", state, worker=worker)
        for number, (worker, state, _) in enumerate(given_replicas)
    ]
    ongoing = {f"b#{number}": float(load) for number, (_, _, load) in enumerate(given_replicas)}
    criteria = EvictionCriteria(ongoing, held.__getitem__, empties_workers)
    left, expected = list(reversed(replicas)), []

    def rank(each: ReplicaRecord) -> tuple[float, ...]:
        others = held[each.worker or ""]
        same = sum(other.worker == each.worker for other in left)
        crowd = others + same if empties_workers else -same
        return (STOP_ORDER.index(each.state), crowd, ongoing[each.tag], others)

    while len(left) > wanted:
        least = min(left, key=rank)
        left.remove(least)
        expected.append(least.tag)
    assert stopped(wanted, replicas, criteria) == expected


def test_as_many_old_replicas_stop_first_as_may_be_missing() -> None:
    replicas = some("v1", *[S.RUNNING] * 5)
    steps = next_steps(5, "v2", replicas, max_surge=0, max_unavailable=2)
    assert (steps.start, steps.stop) == (2, tuple(replicas[:2]))
    # The starting replica does not serve yet, so no other replica stops.
    assert next_steps(5, "v2", take(replicas, steps, "v2", "new"), max_surge=0, max_unavailable=2) == Steps(
        0, ()
    )
    both = next_steps(5, "v2", replicas, max_surge=1, max_unavailable=2)
    assert (both.start, len(both.stop)) == (3, 2)


def test_nothing_may_be_missing_without_an_update() -> None:
    replicas = some("v1", S.RUNNING, S.RUNNING)
    assert next_steps(2, "v1", replicas, max_unavailable=1) == Steps(0, ())
    assert next_steps(2, "v1", replicas, max_unavailable=1, leaving=[replicas[0].tag]) == Steps(1, ())
