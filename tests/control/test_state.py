"""The state's indexes, compared with a search through all records, after random changes."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from control_harness import backend, endpoint, goal, replica, state_of
from held import held
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from daskserve.common.types import ReplicaState
from daskserve.control.records.proxy import ProxyRecord
from daskserve.control.records.records import Change, CodeRecord, Record, ReplicaRecord
from daskserve.control.records.state import State

TAGS = ["a", "b", "c"]
ROUTES = ["/x", "/y", None]
WORKERS = ["w1", "w2", None]

replicas = st.builds(
    lambda tag, n, where, demand: replica(
        f"{tag}#{n}",
        ReplicaState.SHOULD_START if where is None else ReplicaState.RUNNING,
        worker=where,
        demand=demand,
    ),
    st.sampled_from(TAGS),
    st.integers(1, 3),
    st.sampled_from(WORKERS),
    st.dictionaries(st.sampled_from(["CPU", "GPU"]), st.sampled_from([0.1, 0.3, 2.0]), max_size=2),
)
endpoints = st.builds(
    lambda name, route, traffic, shadows: endpoint(
        name, route, traffic=dict.fromkeys(traffic, 0.5), shadows=dict.fromkeys(shadows, 0.5)
    ),
    st.sampled_from(["e1", "e2", "e3"]),
    st.sampled_from(ROUTES),
    st.sets(st.sampled_from(TAGS)),
    st.sets(st.sampled_from(TAGS)),
)
others: st.SearchStrategy[Record] = st.one_of(
    st.builds(
        lambda tag, v: backend(tag, code_key=f"{tag}@{v}"), st.sampled_from(TAGS), st.sampled_from("12")
    ),
    st.builds(
        lambda tag, v, size: CodeRecord(f"{tag}@{v}", tag, b"x" * size),
        st.sampled_from(TAGS),
        st.sampled_from("12"),
        st.integers(0, 3),
    ),
    st.sampled_from(["g1", "g2"]).map(goal),
    st.builds(
        lambda name, where: ProxyRecord(name, where, "h1", 1, 8000),
        st.sampled_from(["p1", "p2"]),
        st.sampled_from(["w2", "w3"]),
    ),
)


class Indexes(RuleBasedStateMachine):
    """Applies changes to a `State` and to a plain dict of all records, and compares their answers."""

    def __init__(self) -> None:
        super().__init__()
        self.state = State()
        self.records: dict[str, Record] = {}

    @rule(
        written=st.lists(replicas | others, max_size=4),
        moved=st.lists(
            endpoints, max_size=2, unique_by=(lambda each: each.name, lambda each: each.route or each.name)
        ),
        gone=st.lists(st.integers(0, 50), max_size=3),
        order=st.randoms(use_true_random=False),
    )
    def change(self, written: list[Record], moved: list[Any], gone: list[int], order: Any) -> None:
        keys = sorted(self.records)
        change: Change = {keys[n % len(keys)]: None for n in gone if keys}
        change.update({each.key: each for each in written})
        for each in moved:
            # A route has one holder, which releases it in the same change.
            for key, known in self.records.items():
                if each.route is not None and getattr(known, "route", None) == each.route and key != each.key:
                    change[key] = None
            change[each.key] = each
        items = list(change.items())
        order.shuffle(items)
        shuffled = dict(items)
        self.state.apply(shuffled)
        for key, record in shuffled.items():
            if record is None:
                self.records.pop(key, None)
            else:
                self.records[key] = record

    def _kind(self, kind: str) -> list[Any]:
        return [record for key, record in self.records.items() if key.startswith(f"{kind}/")]

    @invariant()
    def records_are_what_was_applied(self) -> None:
        state = self.state
        held = [state.backends, state.codes, state.endpoints, state.replicas, state.proxies, state.goals]
        assert {record.key: record for kind in held for record in kind.values()} == self.records

    @invariant()
    def replicas_are_found_by_backend_and_worker(self) -> None:
        found: list[ReplicaRecord] = self._kind("replica")
        for tag in TAGS:
            expected = {each.tag for each in found if each.backend == tag}
            assert {each.tag for each in self.state.replicas_of(tag)} == expected
        for where in ("w1", "w2", "w3"):
            expected = {each.tag for each in found if each.worker == where}
            assert {each.tag for each in self.state.replicas_on(where)} == expected
            assert self.state.count_on(where) == len(expected)
            for tag in TAGS:
                same = [each for each in found if each.worker == where and each.backend == tag]
                assert self.state.count_on(where, tag) == len(same)

    @invariant()
    def the_ledger_is_the_sum(self) -> None:
        sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for each in self._kind("replica"):
            if each.worker is not None:
                for name, amount in each.demand.items():
                    sums[each.worker][name] += amount
        for where in ("w1", "w2", "w3"):
            used = self.state.used(where)
            assert used.keys() >= sums[where].keys()
            for name in used:
                assert used[name] == pytest.approx(sums[where][name], abs=1e-9)
            if not self.state.replicas_on(where):
                assert used == {}

    @invariant()
    def workers_in_use_hold_something(self) -> None:
        found = {each.worker for each in self._kind("replica") + self._kind("proxy")}
        assert self.state.workers_in_use() == found - {None}
        proxies = self._kind("proxy")
        assert self.state.proxies.workers == {each.worker for each in proxies} - {None}
        for where in self.state.proxies.workers:
            expected = {each.tag for each in proxies if each.worker == where}
            assert {each.tag for each in self.state.proxies.on(where)} == expected

    @invariant()
    def endpoints_are_found_by_route_and_backend(self) -> None:
        found = self._kind("endpoint")
        assert self.state.routes() == {each.route: each for each in found if each.route is not None}
        for route in ("/x", "/y"):
            assert self.state.endpoint_at(route) == next((e for e in found if e.route == route), None)
        for tag in TAGS:
            expected = {each.name for each in found if tag in each.traffic or tag in each.shadows}
            assert set(self.state.endpoints_of(tag)) == expected

    @invariant()
    def codes_are_found_by_backend(self) -> None:
        for tag in TAGS:
            expected = {each.name for each in self._kind("code") if each.backend == tag}
            assert {each.name for each in self.state.codes.of(tag)} == expected
        used = {each.code_key for each in self._kind("backend")}
        unused = [each.size_bytes for each in self._kind("code") if each.name not in used]
        assert self.state.codes.unused_bytes == sum(unused)

    def teardown(self) -> None:
        """Without records, nothing is held."""
        self.state.apply(dict.fromkeys(self.records))
        assert held(self.state) == held(State())


TestIndexes = Indexes.TestCase
TestIndexes.settings = settings(max_examples=40, stateful_step_count=12)


def test_replicas_come_oldest_first_however_often_they_change() -> None:
    state = state_of(*(replica(f"b#{n}", ReplicaState.SHOULD_START) for n in (3, 1, 2)))
    for tag in ("b#1", "b#3"):
        state.apply({f"replica/{tag}": replica(tag, ReplicaState.STARTING)})
    assert [each.tag for each in state.replicas_of("b")] == ["b#3", "b#1", "b#2"]


def test_removing_what_is_not_there_is_no_error() -> None:
    state = State()
    state.apply(
        {f"{kind}/x": None for kind in ("app", "backend", "code", "goal", "proxy", "endpoint", "replica")}
    )
    assert repr(state) == "<State backends=0 endpoints=0 applications=0 replicas=0 proxies=0 goals=0>"


def test_a_route_that_changes_hands_in_one_change_stays_known() -> None:
    for keys in (["endpoint/old", "endpoint/new"], ["endpoint/new", "endpoint/old"]):
        state = state_of(endpoint("old", "/x"))
        change: Change = {"endpoint/old": None, "endpoint/new": endpoint("new", "/x")}
        state.apply({key: change[key] for key in keys})
        assert list(state.routes()) == ["/x"]


def test_rounding_errors_leave_with_the_last_replica() -> None:
    state = State()
    for turn in range(50):
        for number in range(3):
            state.apply({f"replica/b#{number}": replica(f"b#{number}", demand={"CPU": 0.1 + turn / 7})})
        for number in range(3):
            state.apply({f"replica/b#{number}": None})
    assert state.used("w1") == {}
