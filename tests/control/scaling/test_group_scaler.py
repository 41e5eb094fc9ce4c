"""Groups: several backends share one call of a user's policy; everything else is per backend."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import pytest
from controller_harness import Stage, play
from scaler_harness import QUICK, Desk, attended

from daskserve.autoscaling import AutoscalingContext, Decision
from daskserve.autoscaling.groups import checked_decisions
from daskserve.client.views.explanation import Explanation
from daskserve.control.scaling import policy_calls
from daskserve.control.scaling.policy_calls import POLICY_RETRY_S
from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.payload.pickling import dump_bytes
from daskserve.simulation.fleet import Service, simulate
from daskserve.simulation.trace import Trace
from daskserve.testing import run_virtual, wait_until

Contexts = Mapping[str, AutoscalingContext]
MODULE = "policies_for_groups"


@pytest.fixture
def policies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module with user policies; setting ``go_on`` ends the calls that hang."""
    module = ModuleType(MODULE)
    go_on = threading.Event()
    asked: list[dict[str, int]] = []

    def hang(contexts: Contexts) -> dict[str, int]:
        asked.append(targets(contexts))
        go_on.wait(30)
        return dict.fromkeys(contexts, 9)

    module.__dict__.update(go_on=go_on, asked=asked, hang=hang)
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setattr(policy_calls, "ANSWER_TIMEOUT_S", 0.1)
    yield module
    go_on.set()


def targets(contexts: Contexts) -> dict[str, int]:
    return {name: each.target_num_replicas for name, each in contexts.items()}


def put(desk: Desk, *tags: str, policy: str = "decide", **options: Any) -> None:
    for tag in tags:
        desk.put(f"{MODULE}:{policy}", tag, **{"group": "g", **options})


def number(desk: Desk, tag: str) -> int:
    return desk.state.backends[tag].num_replicas


def twice(contexts: Contexts) -> dict[str, int]:
    """Return twice as many replicas of b as of a."""
    wanted = int(contexts["a"].samples[-1].queued) if contexts["a"].samples else 1
    return {"a": wanted, "b": 2 * wanted}


# ---- answers


def context(name: str, target: int = 3) -> AutoscalingContext:
    return AutoscalingContext(name, AutoscalingConfig(max_replicas=9), 1, 1, target, target, state={"n": 1})


def test_an_answer_is_split_by_name_and_a_missing_backend_keeps_its_number() -> None:
    contexts = {name: context(name) for name in "abcd"}
    found = checked_decisions({"a": 4, "b": (5, {"n": 2}), "c": Decision(6, "why", {}, True)}, contexts)
    assert {name: each.replicas for name, each in found.items()} == {"a": 4, "b": 5, "c": 6, "d": 3}
    assert (found["b"].state, found["c"].is_urgent) == ({"n": 2}, True)
    assert (found["d"].state, found["d"].reason) == (
        {"n": 1},
        "the group's policy does not change this deployment",
    )


BAD: list[tuple[Any, str]] = [
    (None, "it returned None; return a dict"),
    (4, "it returned 4; return a dict"),
    ([("a", 4)], "return a dict"),
    ({"a": 4, "z": 5}, "returned 5 for 'z', which is not in the group; the group has: a, b"),
    ({1: 5}, "returned 5 for 1, which is not in the group"),
    ({"a": 4, "b": "many"}, "for 'b' it returned 'many'; return a whole number"),
    ({"a": 4, "b": -1}, "for 'b' it returned -1 replicas"),
    ({"a": 4, "b": (5, None)}, "for 'b' its state is None"),
]


@pytest.mark.parametrize(("answer", "message"), BAD)
def test_an_invalid_answer_changes_no_backend(answer: Any, message: str, policies: Any) -> None:
    policies.decide = lambda contexts: answer

    async def scene(desk: Desk) -> None:
        put(desk, "a", "b")
        await wait_until(lambda: message in desk.reason("a") and message in desk.reason("b"))
        assert "the policy failed" in desk.reason("a")
        assert "nothing changes" in desk.reason("b")
        assert (desk.wants("a"), desk.wants("b")) == (None, None)

    asyncio.run(attended(scene))


# ---- policy calls


def test_the_policy_is_called_once_for_all_backends_at_the_shortest_interval(policies: Any) -> None:
    at: list[float] = []

    def decide(contexts: Contexts) -> dict[str, int]:
        at.append(contexts["a"].current_time)
        policies.asked.append(targets(contexts))
        return {}

    policies.decide = decide

    async def scene(desk: Desk) -> None:
        put(desk, "a", metrics_interval_s=5.0)
        put(desk, "b", metrics_interval_s=2.0)
        put(desk, "c", metrics_interval_s=60.0, group="h")
        await asyncio.sleep(21.0)

    run_virtual(attended, scene)
    together = [each for each in policies.asked if "c" not in each]
    assert together[-10:] == [{"a": 3, "b": 3}] * 10
    assert len(together) <= 13
    assert {round(later - before, 3) for before, later in zip(at[-9:], at[-8:], strict=False)} <= {2.0}


def test_backends_join_and_leave_at_any_time(policies: Any) -> None:
    policies.decide = lambda contexts: policies.asked.append(sorted(contexts)) or {}

    async def last(*expected: str) -> None:
        await wait_until(lambda: policies.asked and policies.asked[-1] == list(expected))

    async def scene(desk: Desk) -> None:
        put(desk, "a")
        await last("a")
        put(desk, "b", "c")
        await last("a", "b", "c")
        desk.state.apply({"backend/b": None})
        desk.scaler.wake()
        await last("a", "c")
        put(desk, "c", group=None, policy="decide")
        await last("a")
        put(desk, "c", max_replicas=5)
        await last("a", "c")
        desk.set(replace(desk.state.backends["c"], is_deleting=True))
        await last("a")

    asyncio.run(attended(scene))


def test_backends_with_another_policy_or_arguments_form_a_separate_group(policies: Any) -> None:
    asked: dict[str, list[str]] = {}

    def decide(contexts: Contexts, name: str = "one") -> dict[str, int]:
        asked[name] = sorted(contexts)
        return {}

    policies.decide = decide
    policies.other = partial(decide, name="other")

    async def scene(desk: Desk) -> None:
        put(desk, "a", "b", "c")
        await wait_until(lambda: asked.get("one") == ["a", "b", "c"])
        put(desk, "b", policy="other")
        put(desk, "c", policy_kwargs={"name": "third"})
        await wait_until(lambda: asked == {"one": ["a"], "other": ["b"], "third": ["c"]})
        put(desk, "a", "c", policy="other")
        await wait_until(lambda: asked["other"] == ["a", "b", "c"])

    asyncio.run(attended(scene))


class Counting:
    """A policy with arguments, instantiated once, with a state per backend."""

    made = 0

    def __init__(self, step: int) -> None:
        type(self).made += 1
        self.step = step

    async def __call__(self, contexts: Contexts) -> dict[str, Any]:
        await asyncio.sleep(0)
        found: dict[str, Any] = {}
        for place, (name, each) in enumerate(sorted(contexts.items())):
            seen = each.state.get("seen", 0) + 1
            found[name] = (min(8 + place, place + self.step * seen), {"seen": seen})
        return found


def test_a_policy_may_be_an_async_class_with_a_state_per_backend(
    policies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Counting, "made", 0)
    policies.decide = Counting

    async def scene(desk: Desk) -> None:
        put(desk, "a", "b", policy_kwargs={"step": 2})
        await wait_until(lambda: (number(desk, "a"), number(desk, "b")) == (8, 9))

    asyncio.run(attended(scene, follows=True))
    assert Counting.made == 1


def test_only_the_policy_call_is_shared(policies: Any) -> None:
    policies.decide = lambda contexts: dict.fromkeys(contexts, 8)

    async def scene(desk: Desk) -> None:
        put(desk, "capped", max_replicas=5)
        put(desk, "patient", upscale_delay_s=5.0, metrics_interval_s=1.0)
        put(desk, "dry", dry_run=True)
        put(desk, "stepped", max_upscale_factor=1.5, metrics_interval_s=1.0)
        put(desk, "grouped", multiple_of=3)
        await asyncio.sleep(0.015)
        await wait_until(lambda: number(desk, "capped") == 5)
        await wait_until(lambda: number(desk, "grouped") == 9)
        await wait_until(lambda: "waiting" in desk.reason("patient"))
        await wait_until(lambda: number(desk, "stepped") == 8)
        assert "dry run, would go from 1 to 8" in desk.reason("dry")
        assert number(desk, "dry") == 1
        assert number(desk, "patient") == 3
        await asyncio.sleep(5.0)
        await wait_until(lambda: number(desk, "patient") == 8)

    run_virtual(partial(attended, follows=True), scene)


# ---- failures


@pytest.mark.parametrize("failure", ["raises", "ends", "hang", "nowhere", "hangs_when_made"])
def test_without_an_answer_only_waiting_requests_at_zero_start_replicas(failure: str, policies: Any) -> None:
    def raises(contexts: Contexts) -> dict[str, int]:
        raise RuntimeError("no idea")

    def ends(contexts: Contexts) -> dict[str, int]:
        raise SystemExit(3)

    class HangsWhenMade:
        def __init__(self) -> None:
            policies.go_on.wait(30)

    policies.raises, policies.ends, policies.hangs_when_made = raises, ends, HangsWhenMade
    why = {
        "raises": "no idea",
        "ends": "SystemExit",
        "hang": "has not answered",
        "nowhere": "cannot be used",
        "hangs_when_made": "still being loaded",
    }[failure]

    async def scene(desk: Desk) -> None:
        put(desk, "a", "b", policy=failure)
        desk.set(replace(desk.state.backends["b"], scaled_to=0))
        await wait_until(lambda: why in desk.reason("a") and why in desk.reason("b"))
        assert (desk.wants("a"), desk.wants("b")) == (None, None)
        desk.request_waits("b")
        await wait_until(lambda: desk.wants("b") == 1)
        assert "1 for the waiting requests" in desk.reason("b")
        assert desk.wants("a") is None

    asyncio.run(attended(scene))


def test_waiting_requests_at_zero_override_the_policy(policies: Any) -> None:
    policies.decide = lambda contexts: {"a": 0}

    async def scene(desk: Desk) -> None:
        put(desk, "a", "b", metrics_interval_s=60.0)
        for tag in "ab":
            desk.set(replace(desk.state.backends[tag], scaled_to=0))
        await asyncio.sleep(100.0)
        assert (number(desk, "a"), number(desk, "b")) == (0, 0)
        for tag in "ab":
            desk.request_waits(tag)
        desk.observed.loads.report("router", {"a": (7, 0), "b": (7, 0)}, desk.clock.now())
        await wait_until(lambda: (number(desk, "a"), number(desk, "b")) == (1, 1), timeout_s=1.0)

    run_virtual(partial(attended, follows=True), scene)


def test_calls_do_not_overlap_and_a_late_answer_does_not_apply_to_another_number(
    policies: Any,
) -> None:
    def hang(contexts: Contexts) -> dict[str, int]:
        policies.asked.append(targets(contexts))
        policies.go_on.wait(30)
        return {name: each.target_num_replicas + 1 for name, each in contexts.items()}

    async def scene(desk: Desk) -> None:
        policies.hang = hang
        put(desk, "a", "b", policy="hang")
        await wait_until(lambda: policies.asked)
        if policies.asked != [{"a": 3, "b": 3}]:  # the first joined alone
            policies.go_on.set()
            await wait_until(lambda: policies.asked[-1].keys() == {"a", "b"})
            policies.go_on.clear()
        begun = len(policies.asked)
        await wait_until(lambda: "has not answered" in desk.reason("b"))
        at = desk.decided("b").at
        await wait_until(lambda: desk.decided("b").at > at)
        assert len(policies.asked) == begun
        desk.set(replace(desk.state.backends["a"], scaled_to=7))
        policies.go_on.set()
        await wait_until(lambda: desk.wants("b") == 4)
        assert "answered late, for 3 replicas" in desk.reason("a")
        assert desk.wants("a") is None
        desk.set(replace(desk.state.backends["b"], scaled_to=4))
        await wait_until(lambda: (desk.wants("a"), desk.wants("b")) == (8, 5))

    asyncio.run(attended(scene))


@pytest.mark.parametrize("how", ["other policy", "deleted"])
def test_a_hanging_policy_is_abandoned_when_its_last_backend_leaves(
    how: str, policies: Any, caplog: pytest.LogCaptureFixture
) -> None:
    policies.decide = lambda contexts: dict.fromkeys(contexts, 5)

    async def scene(desk: Desk) -> None:
        put(desk, "a", "b", policy="hang")
        await wait_until(lambda: "has not answered" in desk.reason("a"))
        await wait_until(lambda: "has not answered" in desk.reason("b"))
        if how == "deleted":
            desk.state.apply({"backend/a": None, "backend/b": None})
            desk.scaler.wake()
            await wait_until(lambda: "is abandoned" in caplog.text)
        put(desk, "a", "b")
        await wait_until(lambda: (desk.wants("a"), desk.wants("b")) == (5, 5))

    with caplog.at_level(logging.WARNING, "daskserve.autoscaling"):
        asyncio.run(attended(scene))
    messages = [each.getMessage() for each in caplog.records]
    assert sum("policy of group g hangs; its thread is abandoned" in each for each in messages) == 1


def test_a_policy_that_does_not_load_is_retried(policies: Any) -> None:
    async def scene(desk: Desk) -> None:
        put(desk, "a", "b", policy="later", metrics_interval_s=1.0)
        await asyncio.sleep(2.5 * POLICY_RETRY_S)
        assert "cannot be used" in desk.reason("a")
        policies.later = lambda contexts: dict.fromkeys(contexts, 6)
        await wait_until(lambda: number(desk, "b") == 6, timeout_s=POLICY_RETRY_S + 2, every_s=0.5)

    run_virtual(partial(attended, follows=True), scene)


# ---- in a controller


async def explained(stage: Stage, tag: str) -> Explanation:
    return Explanation.of(await stage.call("explain", name=tag))


def test_b_has_twice_as_many_as_a_also_after_the_controller_is_replaced() -> None:
    config = {
        **QUICK,
        "metrics_interval_s": 1.0,
        "look_back_period_s": 2.0,
        "min_replicas": 1,
        "initial_replicas": None,
        "group": "pair",
        "policy": dump_bytes(twice),
    }

    async def both(stage: Stage, expected: int) -> None:
        for _ in range(30):
            await stage.call("report_load", router="r", loads={"a": [expected, 0]})
            await stage.clock.sleep(1.0)
            if (len(stage.running_of("a")), len(stage.running_of("b"))) == (expected, 2 * expected):
                return
        raise AssertionError(str(await explained(stage, "b")))

    async def scenario(stage: Stage) -> None:
        await stage.create("a", autoscaling_config=config)
        await stage.create("b", autoscaling_config=config)
        await both(stage, 3)
        explanation = await explained(stage, "b")
        assert (explanation.group, explanation.policy_wants) == ("pair", 6)
        assert "a custom policy, of group 'pair', wants 6" in str(explanation)
        assert explanation.events[-1].after == 6
        await both(stage, 2)
        await stage.crash_controller()
        await both(stage, 4)

    play(scenario, workers=4)


# ---- options


@pytest.mark.parametrize("policy", ["target_ongoing_requests", "classic", "schedule", "latency"])
def test_a_built_in_policy_cannot_have_a_group(policy: str) -> None:
    with pytest.raises(ValueError, match=r"decides for one backend at a time, .*; omit group, or set policy"):
        AutoscalingConfig(group="g", policy=policy)
    with pytest.raises(ValueError, match="group"):
        AutoscalingConfig(group="", policy="a:b")


def test_a_group_cannot_be_simulated() -> None:
    config = AutoscalingConfig(group="g", policy=twice)
    with pytest.raises(ValueError, match="group='g' cannot be simulated"):
        simulate(Trace([1.0]), config, Service())


def test_a_function_has_the_same_pickle_each_time() -> None:
    """Policies are compared by their pickles, so each deploy of a program must give the same one."""

    def local(contexts: Contexts) -> dict[str, int]:
        return {name: len(BAD) for name in contexts}

    for policy in (twice, local, Counting):
        assert dump_bytes(policy) == dump_bytes(policy)
