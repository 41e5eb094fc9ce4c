"""The verdict on chaos runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from chaos_verdict import Damage, Run, Sample, Stall, felt_s, report, violations
from tables import each_case

KILL = Damage("kill worker", "kill worker h1a", 1, 10.0, 10.0, frozenset({7}), frozenset({"one"}))


def sample(kind: str = "POST", began: float = 9.9, ended: float = 10.1, **changes: Any) -> Sample:
    given = {"id": "a", "outcome": "502", "proxy": "two", **changes}
    return Sample(kind, began=began, ended=ended, **given)


def steady(*kinds: str, until: float = 20.0) -> list[Sample]:
    """Return answers every half second."""
    steps = int(until * 2)
    return [
        Sample(kind, f"{kind}{step}", step / 2, step / 2 + 0.1, "ok", "two")
        for kind in kinds
        for step in range(steps)
    ]


def judged(
    *samples: Sample, damages: tuple[Damage, ...] = (KILL,), ran: Any = None, **more: Any
) -> list[str]:
    """Return the violations of samples among answers to all kinds of requests."""
    others = steady("GET", "POST", "stream", "websocket", "call")
    ran = {each.id: [frozenset({9})] for each in others} | (ran or {})
    return violations(Run([*others, *samples], damages, ran, **more))


def test_a_request_may_fail_if_it_ran_on_what_died() -> None:
    assert judged(sample(), ran={"a": [frozenset({7, 1})]}) == []
    (found,) = judged(sample(), ran={"a": [frozenset({8, 1})]})
    assert "no fault explains that POST a at 9.90 by the proxy two in [1, 8] failed after 0.20 s" in found


def test_a_request_may_fail_if_it_was_sent_to_a_proxy_that_died() -> None:
    for kind in ("GET", "POST", "stream", "websocket"):
        assert judged(sample(kind, proxy="one")) == []


def test_repeatable_requests_must_survive_their_replica_unless_the_response_had_begun() -> None:
    ran = {"a": [frozenset({7})]}
    assert len(judged(sample("GET"), ran=ran)) == 1
    assert len(judged(sample("stream"), ran=ran)) == 1
    assert judged(sample("stream", outcome="cut short"), ran=ran) == []
    assert judged(sample("websocket"), ran=ran) == []
    assert judged(sample("websocket")) == []


def test_repeatable_requests_may_fail_if_they_ran_on_two_processes_that_died() -> None:
    other = Damage("kill host", "kill host h2", 1, 10.0, 12.0, frozenset({8}), frozenset({"three"}))
    ran = {"a": [frozenset({7}), frozenset({8})]}
    assert judged(sample("GET"), damages=(KILL, other), ran=ran) == []
    assert len(judged(sample("GET"), damages=(KILL,), ran=ran)) == 1


def test_repeatable_requests_may_fail_if_one_poisonous_request_ended_two_processes() -> None:
    poison = replace(KILL, kind="poison", pids=frozenset({7, 8}), proxies=frozenset())
    ran = {"a": [frozenset({8})]}
    assert judged(sample("GET"), damages=(poison,), ran=ran) == []
    assert len(judged(sample("GET"), damages=(replace(poison, kind="kill worker"),), ran=ran)) == 1


def test_repeatable_requests_may_fail_if_two_faults_cut_both_routes() -> None:
    cuts = tuple(replace(KILL, kind="cut", pids=frozenset({pid}), proxies=frozenset()) for pid in (7, 8))
    assert judged(sample("GET"), damages=cuts) == []
    assert judged(sample("GET"), damages=cuts, ran={"a": [frozenset({8})]}) == []
    assert len(judged(sample("GET"), damages=cuts[:1])) == 1
    later = replace(cuts[1], began=20.0, ended=30.0)
    assert len(judged(sample("GET"), damages=(cuts[0], later))) == 1


def test_a_request_that_began_long_after_a_fault_or_ended_before_it_is_not_excused() -> None:
    ran = {"a": [frozenset({7})]}
    assert len(judged(sample(began=14, ended=15), ran=ran)) == 1
    assert len(judged(sample(began=8, ended=9), ran=ran)) == 1
    assert judged(sample(began=12, ended=13), ran=ran, stalls=[Stall(10.5, 1.0)]) == []


def test_a_request_lost_on_its_way_is_excused_where_processes_were_hit() -> None:
    assert judged(sample()) == []
    assert len(judged(sample("GET"))) == 1
    assert len(judged(sample(), damages=(Damage("redeploy", "redeploy", 1, 10.0, 11.0),))) == 1


def test_a_post_is_done_exactly_once_if_it_is_answered_and_never_twice() -> None:
    ran = frozenset({7})
    assert judged(sample(outcome="ok"), ran={"a": [ran]}) == []
    assert "was done 0 times" in judged(sample(outcome="ok"))[0]
    assert "was done 2 times" in judged(sample(outcome="ok"), ran={"a": [ran, ran]})[0]
    assert "was done 2 times" in judged(sample(), ran={"a": [ran, ran]})[0]


def test_an_acknowledged_version_is_not_followed_by_an_older_one() -> None:
    ran = {"a": [frozenset({7})]}
    answered = sample(outcome="ok", version=3)
    run = Run([answered], (), ran, acknowledged=[(9.95, 4), (5.0, 3)])
    assert violations(run) == []
    run.samples = [replace(answered, began=9.96)]
    assert "got version 3, after 4 was acknowledged" in violations(run)[0]


def test_a_proxy_that_was_cut_off_answers_with_the_older_version_for_a_moment_only() -> None:
    cut_off = replace(KILL, kind="cut off host", ended=18.0)
    for began, proxy, count in ((18.3, "one", 0), (20.5, "one", 1), (18.3, "two", 1)):
        answered = sample("GET", began=began, ended=began + 0.1, proxy=proxy, outcome="ok", version=3)
        run = Run([answered], (cut_off,), {}, acknowledged=[(15.0, 4)])
        assert len([each for each in violations(run) if "got version 3" in each]) == count


def with_gap(since: float, until: float, *kinds: str) -> list[Sample]:
    others = steady("GET")
    return [*others, *(each for each in steady(*kinds) if not since <= each.began < until)]


def test_a_silence_longer_than_the_faults_allow_is_a_violation() -> None:
    # Longer than the second that a kill may cost, and shorter than a stopped process may cost.
    samples = with_gap(10, 13.5, "call", "stream")
    ran = {each.id: [frozenset({9})] for each in samples}
    found = violations(Run(samples, (KILL,), ran, origin=9.0))
    assert len(found) == 2
    assert found[0] == (
        "no call was answered for 4.00 s from 0.60, more than 2.50 s (round 1: kill worker h1a)"
    )
    stopped = replace(KILL, kind="stop worker", ended=16.0)
    assert violations(Run(samples, (stopped,), ran)) == []
    assert violations(Run(samples, (KILL,), ran, stalls=[Stall(11.0, 2.0)])) == []
    assert "(no fault)" in violations(Run(samples, (), ran))[0]


def test_the_pause_between_warming_up_and_the_load_is_no_silence() -> None:
    samples = with_gap(10, 13.5, "call", "GET", "stream")
    ran = {each.id: [frozenset({9})] for each in samples}
    assert violations(Run(samples, (), ran))
    assert violations(Run(samples, (), ran, load_began=13.5)) == []


def test_a_kind_that_is_not_answered_again_is_silent_until_the_end() -> None:
    (found,) = violations(Run(with_gap(10, 20, "stream"), (replace(KILL, ended=18.0),), {}))
    assert "no stream was answered for 10.00 s from 9.60" in found
    (found,) = violations(Run([*steady("GET"), sample("stream", proxy="one")], (KILL,), {}))
    assert "no stream was answered for 19.60 s from 0.00" in found


def test_two_faults_at_once_may_last_as_long_as_both() -> None:
    samples = with_gap(10, 12.5, "stream")
    assert len(violations(Run(samples, (KILL,), {}))) == 1
    both = (KILL, replace(KILL, kind="poison"))
    assert violations(Run(samples, both, {})) == []
    later = (KILL, replace(KILL, kind="poison", began=14.0, ended=14.0))
    assert len(violations(Run(samples, later, {}))) == 1


def test_losses_while_the_scheduler_is_away_may_wait_for_its_return() -> None:
    samples = with_gap(10, 18, "stream")
    away = Damage("freeze scheduler", "freeze scheduler for 4 s", 1, 9.0, 13.0)
    assert len(violations(Run(samples, (KILL,), {}))) == 1
    assert len(violations(Run(samples, (away,), {}))) == 1
    assert violations(Run(samples, (KILL, away), {})) == []


def test_the_only_address_may_take_the_start_of_a_worker_or_its_grace_to_return() -> None:
    assert felt_s("kill worker", 0, hits_last_proxy=False) == 1
    assert felt_s("kill worker", 0, hits_last_proxy=True) == 7
    assert felt_s("kill host", 100, hits_last_proxy=True) == 14
    assert felt_s("redeploy", 3, hits_last_proxy=True) == 0.5


def test_leftovers_are_violations() -> None:
    assert judged(leftovers=["threads: 12 more"]) == ["threads: 12 more"]


@each_case(
    ("kinds", "label"),
    [
        (("kill worker",), "kill worker (a proxy)"),
        (("stop worker", "kill worker"), "kill worker (a proxy) + stop worker (a proxy)"),
    ],
)
def test_the_report_counts_faults_failures_and_silences(kinds: tuple[str, ...], label: str) -> None:
    damages = [replace(KILL, kind=kind) for kind in kinds]
    samples = [*with_gap(10, 12, "stream"), *with_gap(15, 18, "call"), *steady("POST")]
    later = Damage("cut", "cut h1 h2", 2, 14.0, 15.0, hits_last_proxy=True)
    run = Run([*samples, sample(), sample("GET")], [*damages, later], {"a": [frozenset({7})]})
    lines = report(run).splitlines()
    rows = [line.split() for line in lines[1 : lines.index("")]]
    assert rows[0] == ["cut", "(the", "proxy)", "1", "0", "3.50", "s"]
    assert [*label.split(), "1", "1", "2.50", "s"] in rows
    assert any(each[:4] == ["no", "fault", "0", "1"] for each in rows)
    assert "POST: 41 sent, 1 failed" in lines
