"""Steps are pure: the same inputs give the same result, and are not changed."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
from control_harness import Bench, backend, goal, replica, state_of, worker
from controller_harness import Stage, play
from hypothesis import given
from hypothesis import strategies as st

from daskserve.cluster.protocols.base import StoreChange
from daskserve.cluster.store.opening import MemoryStore
from daskserve.common.types import Location, ReplicaState
from daskserve.control.backend import step as backend_state
from daskserve.control.backend.inputs import StepInputs
from daskserve.control.backend.step import START_RETRY_S
from daskserve.control.observed.observed import Notes, Observed, Scaling
from daskserve.control.proxies import step as http_state
from daskserve.control.records.proxy import ProxyRecord
from daskserve.control.records.records import CodeRecord, EndpointRecord, Record, to_plain
from daskserve.control.records.state import State
from daskserve.control.records.storing.writer import Writer
from daskserve.errors import ReplicaStartError
from daskserve.options.autoscaling import AutoscalingConfig

BOOM = ReplicaStartError("the constructor raised", user_traceback="Traceback ...")
WORKERS = ("w1", "w2", "w3")
TAGS = tuple(f"b#{letter}" for letter in "ABCDEF")

some_workers = st.sets(st.sampled_from(WORKERS))
some_tags = st.sets(st.sampled_from(TAGS))


@st.composite
def replicas(draw: st.DrawFn) -> list[Record]:
    found: list[Record] = []
    for tag in sorted(draw(some_tags)):
        state = draw(st.sampled_from([each for each in ReplicaState if each is not ReplicaState.STOPPED]))
        fields: dict[str, Any] = {
            "version": draw(st.sampled_from(["v1", "v2"])),
            "config_id": draw(st.sampled_from(["c1", "c2", ""])),
        }
        if state is not ReplicaState.SHOULD_START:
            fields["worker"] = draw(st.sampled_from(WORKERS))
        found.append(replica(tag, state, **fields))
    return found


@st.composite
def states(draw: st.DrawFn) -> State:
    """Return the records of one backend in any condition, with its endpoint, goal, codes and replicas."""
    config: dict[str, Any] = {"num_replicas": draw(st.integers(1, 5))}
    if draw(st.booleans()):
        config = {"autoscaling_config": {"max_replicas": 5}}
    has_goal = draw(st.booleans())
    record = backend(
        config=config,
        goal="g" if has_goal else None,
        is_deleting=draw(st.booleans()),
        is_forced=draw(st.booleans()),
        is_deployment=True,
        scaled_to=draw(st.integers(0, 5)) if "autoscaling_config" in config else None,
    )
    records: list[Record] = [record, CodeRecord("b@v1", "b", b"1"), CodeRecord("b@v2", "b", b"2")]
    records.append(EndpointRecord("b", "/b", ("GET",), {"b": 1.0}, is_legacy=False))
    if has_goal:
        before = to_plain(backend(version="v2", code_key="b@v2", is_deployment=True))
        previous = {"backend/b": draw(st.sampled_from([None, before]))}
        failures = draw(st.sampled_from([{}, {"b": 1}, {"b": 2}]))
        records.append(goal("g", timeout_s=10.0, failures=failures, previous=previous))
    return state_of(*records, *draw(replicas()))


@st.composite
def observations(draw: st.DrawFn) -> Observed:
    """Return any observations of that backend, consistent or not."""
    observed = Observed(
        workers={each: worker(int(each[1]), is_retiring=draw(st.booleans())) for each in draw(some_workers)},
        lost_workers=draw(some_workers),
        unresponsive=draw(some_workers),
        ready={tag: {} for tag in draw(some_tags)},
        failed=dict.fromkeys(draw(some_tags), BOOM),
        unhealthy=dict.fromkeys(draw(some_tags), "it is ill"),
        gone=draw(some_tags),
        configured=dict.fromkeys(draw(some_tags), draw(st.sampled_from(["c1", "c2"]))),
        reconfigure_failed=dict.fromkeys(draw(some_tags), BOOM),
    )
    if draw(st.booleans()):
        retry_at = draw(st.floats(90, 110))
        observed.notes["b"] = Notes(failures=2, retry_at=retry_at, waiting="there is no room")
    if draw(st.booleans()):
        observed.deadlines["g"] = draw(st.floats(90, 110))
    if draw(st.booleans()):
        scaled_to = draw(st.integers(0, 5))
        observed.scalings["b"] = Scaling(
            99.0, AutoscalingConfig(max_replicas=5), scaled_to, 3, 3, "more load"
        )
    observed.loads.report("a router", {"b": (1, 2)}, 99.0)
    return observed


@given(states(), observations(), st.integers(0, 2**64 - 1))
def test_a_backend_s_step_is_repeatable_and_changes_nothing(
    state: State, observed: Observed, seed: int
) -> None:
    before = pickle.dumps((state, observed))
    world = StepInputs(state, observed, 100.0, seed, 7, {"w1"}, 1e9)
    answer = backend_state.step(world, state.backends["b"])
    assert pickle.dumps((state, observed)) == before
    assert backend_state.step(world, state.backends["b"]) == answer


proxies = st.builds(
    lambda name, at, host, port, leaving: ProxyRecord(name, at, host, 1, port, is_leaving=leaving),
    st.sampled_from(["head", *WORKERS, "h1", "h2"]),
    st.sampled_from([*WORKERS, None]),
    st.sampled_from(["h1", "h2", "h3"]),
    st.sampled_from([0, 8000]),
    st.booleans(),
)


@given(
    st.lists(proxies),
    some_workers,
    some_workers,
    st.sets(st.sampled_from(["head", *WORKERS, "h1"])),
    st.sampled_from(Location),
    st.sampled_from([0, 8000]),
)
def test_a_step_of_the_proxies_is_repeatable_and_changes_nothing(
    records: list[ProxyRecord],
    present: set[str],
    lost: set[str],
    ready: set[str],
    location: Location,
    port: int,
) -> None:
    state = state_of(*records)
    observed = Observed(
        workers={each: worker(int(each[1]), host=f"h{each[1]}") for each in present},
        lost_workers=lost,
        proxies_ready={name: {"incarnation": 1, "urls": []} for name in ready},
        proxies_failed=dict.fromkeys(ready, BOOM),
    )
    before = pickle.dumps((state, observed))
    rules = http_state.ProxyRules(location, port, "w1", 10.0, "")
    answer = http_state.step(state, observed, rules, incarnation=7, now=100.0)
    assert pickle.dumps((state, observed)) == before
    assert http_state.step(state, observed, rules, incarnation=7, now=100.0) == answer


# ---- what a step learns holds once its change is in the store


def failing(bench: Bench) -> None:
    """Let the constructor of a running backend's replica fail, outside of any change."""
    bench.create(num_replicas=1)
    bench.settle()
    bench.observed.failed[bench.tags()[0]] = BOOM
    bench.step()
    bench.step()
    bench.observed.failed[bench.tags()[0]] = BOOM


def test_a_failure_counts_once_however_often_its_step_is_decided() -> None:
    bench = Bench()
    failing(bench)
    for _ in range(8):
        bench.decide()
    bench.step()
    notes = bench.observed.notes["b"]
    assert (notes.failures, notes.retry_at) == (1, bench.now + START_RETRY_S)


def test_an_answer_that_came_during_the_commit_is_not_forgotten() -> None:
    bench = Bench()
    bench.create()
    bench.settle()
    tag = bench.tags()[0]
    bench.observed.configured[tag] = "older"
    taken = bench.decide()
    bench.observed.configured[tag] = "newer"
    bench.observed.learn("b", taken.notes)
    assert bench.observed.configured == {tag: "newer"}


def test_a_store_that_refuses_commits_makes_one_failure_count_once() -> None:
    """The pause after one failed constructor is 0.5 s, although eight commits failed meanwhile."""
    starts: list[float] = []

    async def scenario(stage: Stage) -> None:
        await stage.create(num_replicas=1)

        async def fail_twice(replica: Any) -> None:
            starts.append(stage.clock.now())
            if len(starts) == 1:
                stage.store.failures = 8
                raise BOOM

        stage.start = fail_twice
        stage.cluster.remove_worker(next(iter(stage.running.values())).worker)
        await stage.until(lambda: len(starts) == 2)
        assert stage.store.failures == 0

    play(scenario, workers=3)
    # Eight retries of the commit, 0.2 s apart, and the pause of the first failure.
    assert starts[1] - starts[0] < 8 * 0.2 + START_RETRY_S + 0.2


def test_later_steps_hold_if_the_store_has_an_unconfirmed_change() -> None:
    """The store's answer is lost. Once the records are read again, the change counts as confirmed."""

    class Unheard(MemoryStore):
        async def commit(self, epoch: int, change: StoreChange) -> None:
            await super().commit(epoch, change)
            raise OSError("the connection broke")

    async def main() -> None:
        store, state, learnt = Unheard(), State(), list[str]()
        await store.open()
        epoch = await store.claim_epoch()
        writer = Writer(store, epoch, state, state.apply)
        record = backend()
        with pytest.raises(OSError, match="broke"):
            async with writer:
                await writer.commit({record.key: record}, lambda: learnt.append("b"))
        assert not state.backends
        assert not learnt
        async with writer:
            assert state.backends == {"b": record}
            assert learnt == ["b"]

    asyncio.run(main())
