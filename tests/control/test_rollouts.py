"""Rollouts without a cluster: two versions side by side, step by step, and the ends of rollouts."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from control_harness import Bench, worker
from tables import each_case

from daskserve.common.clock import LoopClock
from daskserve.common.types import ReplicaState as S
from daskserve.control.decisions import rollouts
from daskserve.control.decisions.history.events import events_of
from daskserve.control.decisions.scale import scale
from daskserve.control.observed.observed import Observed
from daskserve.control.observed.rollout_counts import RolloutCounts
from daskserve.control.observed.rollout_evidence import (
    Evidence,
    VersionCounts,
    is_worse,
    judge,
    least_requests,
)
from daskserve.control.records.events import EventsRecord
from daskserve.control.records.models import ModelsRecord
from daskserve.control.records.records import Change, ReplicaRecord
from daskserve.control.records.rollout import RolloutPhase as P
from daskserve.control.records.rollout import RolloutState
from daskserve.control.records.storing.encoding import decode, encode
from daskserve.control.scaling.rollout_queries import RolloutQueries
from daskserve.control.views.published import published_backend
from daskserve.control.views.rollouts import rollout_status, rollout_text
from daskserve.errors import NotFoundError, RolloutError
from daskserve.options.rollout import Gate, RolloutConfig
from daskserve.payload.packed_errors import load_error
from daskserve.testing import run_virtual

#: A plan whose steps need only ``min_requests`` requests.
PLAN: Mapping[str, Any] = {
    "steps": ["10%", "50%", "100%"],
    "pause_s": 30,
    "min_requests": 100,
    "gates": [{"detects": "100%"}],
}


class RolloutBench(Bench):
    """A backend with four replicas of version 1, and a rollout of version 2."""

    def __init__(self, plan: Mapping[str, Any] = PLAN, replicas: int = 4) -> None:
        super().__init__([worker(n) for n in range(1, 4)])
        self.plan = plan
        self.replicas = replicas
        self.deploy(version="1", num_replicas=replicas)
        self.settle()
        self.goal = self.to_version("2")

    def to_version(self, version: str, **options: Any) -> str:
        request_id = f"request {version} {options}"
        goal = self.deploy(
            version=version,
            user_version=version,
            num_replicas=self.replicas,
            rollout=self.plan,
            request_id=request_id,
            **options,
        )
        self.settle()
        return goal

    @property
    def phase(self) -> P | None:
        rollout = self.state.backends["b"].rollout
        return None if rollout is None else rollout.phase

    def running(self) -> dict[str, int]:
        """Return the number of running replicas by version."""
        found: dict[str, int] = {}
        for each in self.state.replicas_of("b"):
            if each.state is S.RUNNING:
                found[each.version] = found.get(each.version, 0) + 1
        return found

    def published(self) -> dict[str, Any]:
        value: dict[str, Any] = published_backend(self.state, "b")
        return value

    def share(self) -> float | None:
        rollout = self.published().get("rollout")
        return None if rollout is None else rollout["share"]

    def answer(self, new: tuple[int, int], old: tuple[int, int], router: str = "r") -> None:
        """Report the requests and the failures of both versions since the step began."""
        key = self.published()["rollout"]["key"]
        counted = {"key": key, "new": [*new, [new[0]]], "old": [*old, [old[0]]]}
        self.observed.rollouts.report(router, {"b": counted})

    def after(self, seconds: float) -> None:
        self.now += seconds
        self.wall += seconds
        self.settle()


def test_a_version_that_is_as_good_gets_all_traffic_step_by_step() -> None:
    bench = RolloutBench()
    seen = [(bench.share(), bench.running())]
    for _ in range(2):
        bench.answer((200, 0), (1000, 1))
        bench.after(31)
        bench.after(1)
        seen.append((bench.share(), bench.running()))
    assert seen == [
        (0.1, {"1": 4, "2": 1}),
        (0.5, {"1": 4, "2": 2}),
        (1.0, {"1": 4, "2": 4}),
    ]
    bench.answer((200, 0), (0, 0))
    bench.after(31)
    bench.after(1)
    assert (bench.share(), bench.running(), bench.phase) == (None, {"2": 4}, P.COMPLETED)
    assert not bench.state.goals[bench.goal].is_pending


@each_case(
    "why, seconds, new",
    [("pause_s has not passed", 29, (500, 0)), ("too few requests", 300, (99, 0))],
)
def test_a_step_takes_its_time_and_its_requests(why: str, seconds: float, new: tuple[int, int]) -> None:
    bench = RolloutBench()
    bench.answer(new, (1000, 1))
    bench.after(seconds)
    assert (bench.share(), bench.phase) == (0.1, P.SERVING)
    bench.answer((500, 0), (1000, 1))
    bench.after(2)
    bench.after(1)
    assert bench.share() == 0.5


@each_case("least, compared", [(100, 99), (0, 0)])
def test_a_step_that_only_compares_waits_for_answers(least: int, compared: int) -> None:
    bench = RolloutBench({**PLAN, "steps": ["0%", "100%"], "shadow": "10%", "min_requests": least})

    def compare(count: int) -> None:
        key = bench.published()["rollout"]["key"]
        counted = {
            "key": key,
            "new": [0, 0, []],
            "old": [900, 0, [900]],
            "shadowed": [count, 0, [], 7, "f raised OSError"],
        }
        bench.observed.rollouts.report("r", {"b": counted})

    compare(compared)
    bench.after(300)
    assert (bench.share(), bench.phase) == (0.0, P.SERVING)
    lacks = f"{compared} of {'100 answers have' if least else '1 answer has'} been compared"
    text = rollout_text(bench.observed, bench.state.backends["b"], bench.state.replicas_of("b"))
    assert f"{lacks}; 7 could not be compared: f raised OSError" in text
    assert text.count("raised") == 1
    compare(max(1, least))
    bench.after(2)
    bench.after(1)
    assert bench.share() == 1.0


def test_a_worse_version_is_rolled_back_with_measurements() -> None:
    bench = RolloutBench()
    bench.answer((400, 12), (3600, 4))
    bench.after(10)
    backend = bench.state.backends["b"]
    assert (bench.share(), bench.running(), bench.phase) == (None, {"1": 4}, P.ROLLED_BACK)
    assert backend.version == "1"
    assert "12 of 400 requests (3 %) of the new version failed, 4 of 3600" in backend.last_error
    error = load_error(bench.state.goals[bench.goal].error or b"")
    assert isinstance(error, RolloutError)
    status = rollout_status(bench.state, bench.observed, backend)
    assert (status["state"], status["version"], status["stable"]) == ("ROLLED_BACK", "2", "1")


def test_a_lost_replica_of_the_old_version_is_replaced_by_one_of_the_old_version() -> None:
    bench = RolloutBench()
    lost = next(each for each in bench.state.replicas_of("b") if each.version == "1")
    bench.observed.failed[lost.tag] = RuntimeError("it died")
    bench.settle()
    assert bench.running() == {"1": 4, "2": 1}
    assert lost.tag not in bench.state.replicas


def test_replicas_of_both_versions_that_start_in_one_step_have_names_of_their_own() -> None:
    bench = RolloutBench()
    bench.state.apply({each.key: None for each in bench.state.replicas_of("b")})
    started = [each for each in bench.decide().change.values() if isinstance(each, ReplicaRecord)]
    assert Counter(each.version for each in started) == {"1": 4, "2": 1}


def test_a_number_that_an_operator_sets_meanwhile_is_that_of_both_versions_and_stays() -> None:
    bench = RolloutBench()
    bench.state.apply(scale(bench.state, "b", 10, bench.wall, by="ann"))
    bench.settle()
    assert bench.running() == {"1": 10, "2": 1}
    bench.state.apply(rollouts.abort(bench.state, bench.state.backends["b"], bench.wall, "ann"))
    bench.settle()
    assert (bench.running(), bench.phase) == ({"1": 10}, P.ABORTED)
    bench.to_version("3")
    assert bench.running() == {"1": 10, "3": 1}, "the new version begins with the number of its options"


def test_reports_of_replicas_of_both_versions_are_handled_once() -> None:
    bench = RolloutBench()
    tags = {each.version: each.tag for each in bench.state.replicas_of("b")}
    bench.observed.configured.update(dict.fromkeys(tags.values(), "c"))
    bench.settle()
    assert (set(tags), bench.observed.configured) == ({"1", "2"}, {})
    bench.observed.reconfigure_failed.update(dict.fromkeys(tags.values(), ValueError("no")))
    bench.settle()
    assert bench.observed.reconfigure_failed == {}
    assert set(tags.values()).isdisjoint(bench.state.replicas), "others have taken their places"


def test_requests_do_not_wait_for_a_version_without_replicas() -> None:
    bench = RolloutBench()
    planned = bench.published()["rollout"]["key"]
    (new,) = (each for each in bench.state.replicas_of("b") if each.version == "2")
    bench.observed.failed[new.tag] = RuntimeError("it died")
    bench.step()
    assert bench.share() == 0.0
    assert bench.published()["rollout"]["key"] != planned
    bench.settle()
    assert bench.share() == 0.1
    assert bench.published()["rollout"]["key"] == planned


def event_of(bench: RolloutBench, change: Change) -> str:
    """Apply a change, and return the message of its event."""
    [row] = events_of(bench.state, change, {}, wall=0.0, number=1).values()
    bench.state.apply(change)
    assert isinstance(row, EventsRecord)
    return str(row.entries[-1][1]).partition(", ")[2]


def test_pause_promote_and_abort() -> None:
    bench = RolloutBench()
    paused = event_of(bench, rollouts.pause(bench.state.backends["b"], bench.wall, by="ann"))
    assert paused == "step 1 of 3: paused by ann"
    bench.answer((500, 0), (1000, 1))
    bench.after(1000)
    assert (bench.share(), bench.phase) == (0.1, P.PAUSED)
    promoted = event_of(bench, rollouts.promote(bench.state.backends["b"], bench.wall, full=False, by="bob"))
    assert promoted == "step 2 of 3: the replicas of version '2' start: promoted by bob"
    bench.after(1)
    bench.after(1)
    assert (bench.share(), bench.phase) == (0.5, P.SERVING)
    bench.state.apply(rollouts.abort(bench.state, bench.state.backends["b"], bench.wall, "ann"))
    bench.settle()
    assert (bench.share(), bench.running(), bench.phase) == (None, {"1": 4}, P.ABORTED)
    assert "aborted by ann" in bench.state.backends["b"].last_error
    assert rollouts.abort(bench.state, bench.state.backends["b"], bench.wall, "ann") == {}
    with pytest.raises(NotFoundError, match="to promote: it is ABORTED"):
        rollouts.promote(bench.state.backends["b"], bench.wall, full=True)


def test_the_retry_of_a_promotion_changes_nothing() -> None:
    bench = RolloutBench()
    for full in (False, True):
        before = bench.state.backends["b"]
        change = rollouts.promote(before, bench.wall, full=full, request_id=f"call {full}")
        assert change
        bench.state.apply(change)
        bench.after(1)
        bench.after(1)
        again = rollouts.promote(bench.state.backends["b"], bench.wall, full=full, request_id=f"call {full}")
        assert again == {}
    assert bench.phase is P.COMPLETED


@each_case("needs", [{"min_requests": 1000}, {"min_requests": 0, "gates": []}])
def test_a_version_whose_replicas_are_lost_does_not_continue(needs: Mapping[str, Any]) -> None:
    bench = RolloutBench({**PLAN, "steps": ["10%"], **needs})
    bench.answer((5, 0), (50, 0))
    (new,) = (each for each in bench.state.replicas_of("b") if each.version == "2")
    bench.observed.failed[new.tag] = RuntimeError("it died")
    bench.now += 31
    bench.wall += 31
    bench.step()
    assert (bench.share(), bench.phase) == (0.0, P.SERVING)


@each_case(
    ("plan", "new"),
    [
        ({**PLAN, "gates": [{"detects": "100%"}]}, (200, 200)),
        ({**PLAN, "steps": ["10%"]}, (200, 0)),
    ],
)
def test_the_end_of_a_rollout_starts_no_surplus_replicas(
    plan: Mapping[str, Any], new: tuple[int, int]
) -> None:
    bench = RolloutBench(plan)
    bench.answer(new, (1000, 1))
    bench.now += 31
    bench.wall += 31
    for _ in range(20):
        bench.step()
        assert len([each for each in bench.state.replicas_of("b") if each.state is not S.STOPPING]) <= 5
    bench.settle()
    assert bench.phase in (P.ROLLED_BACK, P.COMPLETED)
    assert sum(bench.running().values()) == 4


def test_full_promotion_ends_a_rollout_by_an_ordinary_update() -> None:
    bench = RolloutBench()
    bench.state.apply(rollouts.promote(bench.state.backends["b"], bench.wall, full=True))
    assert bench.share() is None
    assert len(bench.published()["replicas"]) == 5  # both versions
    bench.settle()
    assert (bench.running(), bench.phase) == ({"2": 4}, P.COMPLETED)


def test_a_third_version_begins_again_beside_the_first() -> None:
    bench = RolloutBench()
    bench.answer((200, 0), (1000, 1))
    bench.after(31)
    bench.after(1)
    bench.to_version("3")
    assert (bench.share(), bench.running()) == (0.1, {"1": 4, "3": 1})
    bench.to_version("1")
    assert (bench.share(), bench.running(), bench.phase) == (None, {"1": 4}, None)


def test_a_change_of_other_options_does_not_begin_again() -> None:
    bench = RolloutBench()
    bench.answer((200, 0), (1000, 1))
    bench.after(31)
    bench.after(1)
    bench.to_version("2", max_queued_requests=7)
    assert (bench.share(), bench.running()) == (0.5, {"1": 4, "2": 2})


def test_a_version_beside_one_that_does_not_run_is_deployed_at_once() -> None:
    bench = RolloutBench(replicas=1)
    for each in list(bench.state.replicas_of("b")):
        bench.state.apply({each.key: None})
    bench.to_version("4")
    assert (bench.running(), bench.phase) == ({"4": 1}, None)


def test_a_rollout_waits_for_room_and_says_so() -> None:
    bench = RolloutBench({**PLAN, "steps": ["100%"]}, replicas=100)
    assert bench.running()["1"] == 100
    assert bench.phase is P.STARTING
    status = rollout_status(bench.state, bench.observed, bench.state.backends["b"])
    assert "a replica needs CPU 0.1" in status["waiting"]
    assert bench.share() == 0.0


def test_a_new_controller_continues_where_the_old_one_was() -> None:
    bench = RolloutBench()
    bench.after(20)
    heir = RolloutBench()
    heir.state, heir.now, heir.wall = bench.state, 5.0, bench.wall
    heir.observed = Observed(workers=bench.observed.workers)
    heir.observed.inherited = frozenset({bench.goal})
    heir.observed.ready.update(bench.observed.ready)
    record = bench.state.backends["b"]
    assert decode(record.key, encode(record)) == record
    heir.settle()
    heir.answer((200, 0), (1000, 1))
    heir.after(11)
    heir.after(1)
    assert heir.share() == 0.5


def test_expressions_are_compared_for_the_replicas_of_both_versions() -> None:
    gate = {
        "metric": "prometheus",
        "query": 'f{replica=~"$replicas",v="$version"}',
        "prometheus_address": "http://p",
        "interval_s": 15,
    }
    bench = RolloutBench({**PLAN, "min_requests": 0, "gates": [gate]}, replicas=2)
    asked: list[str] = []

    async def fetch(url: str) -> bytes:
        (query,) = parse_qs(urlsplit(url).query)["query"]
        asked.append(query)
        value = 9 if '"2"' in query else 1
        return json.dumps(
            {"status": "success", "data": {"resultType": "scalar", "result": [0, str(value)]}}
        ).encode()

    async def watch() -> None:
        queries = RolloutQueries(bench.state, bench.observed, LoopClock(), fetch)
        watching = asyncio.create_task(queries.run())
        while bench.phase is P.SERVING:
            await asyncio.sleep(5)
            bench.after(5)
        watching.cancel()

    run_virtual(watch)
    (new,) = (query for query in set(asked) if '"2"' in query)
    assert new.startswith('f{replica=~"b\\\\#')
    assert bench.phase is P.ROLLED_BACK
    assert "in 14 of 14 comparisons, last 9 beside 1" in bench.state.backends["b"].last_error
    assert len(asked) == 28


def test_a_comparison_that_cannot_be_made_says_why() -> None:
    gate = {"metric": "prometheus", "query": "f", "prometheus_address": "http://p", "interval_s": 1}
    bench = RolloutBench({**PLAN, "min_requests": 0, "gates": [gate]}, replicas=2)
    answers = [[], [{"value": [0, "1"]}]]

    async def fetch(url: str) -> bytes:
        return json.dumps(
            {"status": "success", "data": {"resultType": "vector", "result": answers[0]}}
        ).encode()

    async def watch() -> None:
        queries = RolloutQueries(bench.state, bench.observed, LoopClock(), fetch)
        for lately in (
            "",
            "0 of 14 comparisons of f are done; the last one failed: for version '2', the query",
            "",
        ):
            text = rollout_text(bench.observed, bench.state.backends["b"], bench.state.replicas_of("b"))
            assert lately in text
            assert ("failed" in text) == bool(lately)
            if lately:
                del answers[0]
            await queries.compare()
            await asyncio.sleep(2)
            await queries.compare()

    run_virtual(watch)


def test_the_versions_of_a_model_are_compared_by_an_expression() -> None:
    gate = {"metric": "prometheus", "query": 'f{v="$version"}', "prometheus_address": "http://p"}
    plan = {"steps": ["50%", "100%"], "gates": [{**gate, "interval_s": 5}]}
    bench, asked = Bench([worker(1)]), set()
    bench.deploy(model_repository={"url": "/models", "rollout": plan})
    bench.settle()
    rollout = RolloutState("m#2", ("2", "1"), phase=P.SERVING, served=0)
    states = {version: {"state": state} for version, state in (("1", "READY"), ("2", "ROLLING_OUT"))}
    bench.state.models["b"] = ModelsRecord("b", {"m": states}, {"m": "1"}, 2, {"m": rollout.to_plain()})

    async def fetch(url: str) -> bytes:
        (query,) = parse_qs(urlsplit(url).query)["query"]
        asked.add(query)
        value = 9 if '"2"' in query else 1
        return json.dumps(
            {"status": "success", "data": {"resultType": "scalar", "result": [0, str(value)]}}
        ).encode()

    async def watch() -> None:
        queries = RolloutQueries(bench.state, bench.observed, LoopClock(), fetch)
        await queries.compare()
        await asyncio.sleep(6)
        await queries.compare()

    run_virtual(watch)
    assert asked == {'f{v="1"}', 'f{v="2"}'}
    assert bench.observed.rollouts.evidence("b#model/m", "m#2/0/0.5").polls == {0: (1, 0, 9, 1)}


# ---- the test of significance


def requests(rng: np.random.Generator, count: int, share: float, rates: tuple[float, float]) -> Evidence:
    """Return the outcomes of ``count`` requests; ``rates`` are the error rates of the new and old version."""
    new = int(rng.binomial(count, share))
    ended = (new, count - new)
    both = [VersionCounts(n, int(rng.binomial(n, rate))) for n, rate in zip(ended, rates, strict=True)]
    return Evidence(*both)


@each_case("share", [0.05, 0.5])
def test_three_percent_of_errors_are_found_before_a_step_ends_and_chance_is_not(share: float) -> None:
    found, p = {0.03: 0, 0.001: 0}, 0.001 / 3
    for seed in range(30):
        for rate in found:
            rng, evidence, is_found = np.random.default_rng(seed), Evidence(), False
            while not is_found and evidence.new.requests < least_requests(Gate(), evidence, share, p):
                more = requests(rng, int(200 / share), share, (rate, 0.001))
                evidence = Evidence(evidence.new + more.new, evidence.old + more.old)
                is_found = judge(Gate(), 0, evidence, share, p).is_worse
            found[rate] += is_found
    assert found == {0.03: 30, 0.001: 0}


@each_case(
    "detects, share, rate, least",
    [
        ("2%", 0.05, 0.0, 760),
        ("2%", 0.5, 0.0, 1564),
        ("10%", 0.05, 0.0, 152),
        ("2%", 0.05, 0.5, 166),  # twice the errors are found soon where there are many
        ("2%", 1.0, 0.0, 0),
    ],
)
def test_how_many_requests_a_step_needs(detects: str, share: float, rate: float, least: int) -> None:
    evidence = Evidence(old=VersionCounts(10_000, int(10_000 * rate)))
    assert least_requests(Gate(detects=detects), evidence, share, 0.001 / 3) == least


def test_repeated_checks_do_not_find_a_difference_that_is_not_there() -> None:
    """With a simple significance test at each check, half of these would be rolled back."""
    alarms = 0
    for seed in range(100):
        rng, new, events = random.Random(seed), 0, 0
        while events < 1000:
            new += sum(rng.random() < 0.25 for _ in range(10))
            events += 10
            if is_worse(new, events - new, 0.25, 0.0, 0.05):
                alarms += 1
                break
    assert alarms <= 5


@each_case(
    "why, gate, evidence, expected",
    [
        (
            "slow",
            {"metric": "latency", "quantile": 0.9},
            Evidence(VersionCounts(200, 0, (0,) * 9 + (200,)), VersionCounts(2000, 0, (0,) * 6 + (2000,))),
            True,
        ),
        (
            "as fast",
            {"metric": "latency", "quantile": 0.9},
            Evidence(VersionCounts(200, 0, (0,) * 6 + (200,)), VersionCounts(2000, 0, (0,) * 6 + (2000,))),
            False,
        ),
        (
            "larger",
            {"metric": "prometheus", "query": "q", "prometheus_address": "http://p"},
            Evidence(polls={0: (20, 0, 3.0, 1.0)}),
            True,
        ),
        (
            "not compared",
            {"metric": "prometheus", "query": "q", "prometheus_address": "http://p"},
            Evidence(),
            False,
        ),
    ],
)
def test_gates(why: str, gate: Mapping[str, Any], evidence: Evidence, expected: bool) -> None:
    assert judge(Gate(**gate), 0, evidence, 0.1, 0.001, 1.0).is_worse is expected


@each_case(
    "options, message",
    [
        ({"steps": ["25%", "5%"]}, "do not increase"),
        ({"steps": ["a"]}, "not a share of the traffic"),
        ({"steps": [0.5]}, "not a share of the traffic"),
        ({"sticky": "session"}, "header:X-Session"),
        ({"gates": [{"metric": "prometheus"}]}, "needs query and prometheus_address"),
        ({"gates": [{"query": "q"}]}, "leave them out"),
        ({"compare": lambda a, b: True}, "move the function into a module"),
    ],
)
def test_wrong_plans(options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutConfig(**options)


def test_reports_of_an_earlier_step_do_not_reset_the_present_one() -> None:
    counts = RolloutCounts()

    def report(router: str, key: str, new: int, failed: int) -> None:
        counts.report(router, {"b": {"key": key, "new": [new, failed, [new]], "old": [9 * new, 0, []]}})

    report("one", "r/0/0.1", 5, 1)
    for n in (10, 20):
        report("one", "r/1/0.5", n, n // 10)
        report("two", "r/1/0.5", n, 0)
        report("late", "r/0/0.1", 6, 0)
    found = counts.evidence("b", "r/1/0.5")
    assert (found.new, found.old) == (VersionCounts(40, 2, (40,)), VersionCounts(360))
    assert counts.evidence("b", "r/0/0.1").new == VersionCounts(11, 1, (11,))
    for n in range(2, 9):
        report("one", f"r/{n}/1", 1, 0)
    assert counts.evidence("b", "r/0/0.1").new.requests == 0, "few steps are kept"
