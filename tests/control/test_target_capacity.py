"""The target capacity of an instance: it is recorded, applies at once, and is fully reset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from control_harness import Bench, backend, state_of
from controller_harness import ScriptedReplica, Stage, play, staged
from tables import each_case

from daskserve.client.views.explanation import Explanation
from daskserve.client.views.status import Status
from daskserve.control.decisions.scale import scale
from daskserve.control.decisions.target_capacity import set_logging, set_target_capacity
from daskserve.control.records.records import BackendRecord, CapacityRecord
from daskserve.control.records.state import State
from daskserve.control.scaling.recorded import carried_over
from daskserve.errors import ReplicaStartError
from daskserve.options.backend import BackendConfig
from daskserve.payload.pickling import dump_bytes

OPTIONS: Mapping[str, Any] = {"min_replicas": 2, "max_replicas": 20, "initial_replicas": 10}


def autoscaled(tag: str = "a", scaled_to: int | None = None, **options: Any) -> BackendRecord:
    """Return a new backend's record."""
    config = {"autoscaling_config": {**OPTIONS, **options}}
    made = carried_over(backend(tag, config=config), None, 0.0)
    return made if scaled_to is None else replace(made, scaled_to=scaled_to)


def put(state: State, *percents: float | None) -> State:
    for percent in percents:
        state.apply(set_target_capacity(state, percent, 5.0))
    return state


def numbers(state: State) -> list[int]:
    return [each.num_replicas for each in state.backends.values()]


def direction(state: State) -> str | None:
    (found,) = {state.capacity.direction, *(each.capacity_direction for each in state.backends.values())}
    return found


def test_fixed_numbers_are_scaled_and_come_back() -> None:
    state = state_of(*(backend(f"b{count}", num_replicas=count) for count in (10, 1, 3)))
    before = {tag: replace(each, last_change="UPSCALE") for tag, each in state.backends.items()}
    assert numbers(put(state, 50)) == [5, 1, 2]
    assert numbers(put(state, 1)) == [1, 1, 1]
    assert numbers(put(state, 0)) == [0, 0, 0]
    assert numbers(put(state, 100)) == [10, 1, 3]
    put(state, None)
    assert numbers(state) == [10, 1, 3]
    scaled = {tag: replace(each, last_change="UPSCALE") for tag, each in state.backends.items()}
    assert (scaled, state.capacity, len(state.records())) == (before, CapacityRecord(), 3)


def test_autoscaled_numbers_stay_within_the_share_of_their_bounds() -> None:
    state = state_of(autoscaled("a", 15), autoscaled("z", 0, min_replicas=0))
    assert numbers(put(state, 50)) == [10, 0]
    scaling = state.backends["a"].scalings[-1]
    assert scaling == (
        5.0, 15, 10, "1 to 10 replicas are allowed now, at a target capacity of 50 %"
    )  # fmt: skip
    assert numbers(put(state, 0)) == [0, 0]
    assert numbers(put(state, None)) == [2, 0]


def test_the_first_number_is_the_least_on_the_way_up_alone() -> None:
    state = state_of(autoscaled("a", 15))
    assert (numbers(put(state, 30)), direction(state)) == ([6], "DOWN")
    assert (numbers(put(state, 10)), direction(state)) == ([2], "DOWN")
    assert (numbers(put(state, 40)), direction(state)) == ([4], "UP")
    assert (numbers(put(state, 100)), direction(state)) == ([10], "UP")
    assert (numbers(put(state, None)), direction(state)) == ([10], None)
    assert (numbers(put(state, 30)), direction(state)) == ([6], "DOWN")


@each_case(
    ("percents", "expected"),
    [
        ([None], None),
        ([50], "DOWN"),
        ([50, 50], "DOWN"),
        ([50, 60, 60], "UP"),
        ([50, 60, None], None),
        ([100], None),
        ([100, 99], "DOWN"),
        ([0, 100], "UP"),
    ],
)
def test_the_direction_follows_from_the_value_before(
    percents: Sequence[float | None], expected: str | None
) -> None:
    assert direction(put(state_of(backend()), *percents)) == expected


def test_an_instance_without_backends_is_on_its_way_up() -> None:
    assert direction(put(State(), 10)) == "UP"
    assert direction(put(state_of(backend(is_deleting=True)), 10)) == "UP"


def test_setting_the_same_capacity_changes_nothing() -> None:
    state = put(state_of(backend(num_replicas=4), autoscaled()), 50)
    assert set_target_capacity(state, 50, 9.0) == {}
    assert set_target_capacity(state, 50.0, 9.0) == {}
    assert set_target_capacity(State(), None, 9.0) == {}


@each_case(
    ("options", "capacity", "expected"),
    [
        ({}, None, 10),
        ({}, 50.0, 5),
        ({"initial_replicas": None, "min_replicas": 3, "multiple_of": 2}, None, 4),
        ({"max_replicas": 10}, 0.0, 0),
    ],
)
def test_a_change_is_complete_with_the_share_of_the_first_number(
    options: dict[str, Any], capacity: float | None, expected: int
) -> None:
    made = replace(autoscaled("a", 0 if capacity == 0 else 18, **options), capacity=capacity)
    assert made.needed_replicas == expected


def test_a_dry_run_keeps_its_number_but_for_the_share() -> None:
    ten = replace(autoscaled(initial_replicas=None), scaled_to=10)
    held = replace(
        ten,
        config=ten.config.merged(
            BackendConfig(autoscaling_config={**OPTIONS, "initial_replicas": None, "dry_run": True})
        ),
    )
    state = state_of(carried_over(held, ten, 0.0))
    assert [numbers(put(state, each)) for each in (50, 30, 0, None)] == [[5], [3], [0], [10]]
    # A number that begins to count at half capacity is half of the number at full capacity.
    state = put(state_of(ten), 50)
    half = carried_over(replace(held, capacity=50.0), state.backends["a"], 0.0)
    assert half.num_replicas == 10
    assert carried_over(half, half, 0.0) == half
    state.apply({half.key: half})
    assert [numbers(put(state, each)) for each in (25, 50)] == [[5], [10]]


def test_an_external_scalers_number_is_one_at_full_capacity() -> None:
    outside = backend("b", config={"num_replicas": 2, "external_scaler_enabled": True})
    state = put(state_of(outside), 50)
    assert numbers(state) == [1]
    state.apply(scale(state, "b", 8, 5.0))
    assert numbers(state) == [4]
    assert state.backends["b"].scalings == ((5.0, 2, 8, "asked for by the external scaler"),)
    assert scale(state, "b", 8, 6.0) == {}
    again = carried_over(replace(state.backends["b"], version="v2"), state.backends["b"], 6.0)
    assert again.num_replicas == 4
    assert [numbers(put(state, each)) for each in (0, 100, None)] == [[0], [8], [8]]
    # A policy continues with the current replicas; on reset, with their number at full capacity.
    put(state, 50)
    scaled = carried_over(
        replace(state.backends["b"], config=BackendConfig(autoscaling_config=dict(OPTIONS))),
        state.backends["b"],
        7.0,
    )
    assert scaled.num_replicas == 4
    back = carried_over(
        replace(outside, config=BackendConfig(external_scaler_enabled=True), capacity=50.0), scaled, 8.0
    )
    assert (back.num_replicas, back.full_replicas) == (4, 8)


def test_a_rolled_back_record_has_the_current_capacity() -> None:
    bench = Bench()
    bench.create(autoscaling_config=OPTIONS)
    bench.settle()
    bench.create("fixed", num_replicas=8)
    bench.settle("fixed")
    bench.update(user_config=b"bad")
    bench.update("fixed", user_config=b"bad")
    put(bench.state, 50)
    for tag in ("b", "fixed"):
        bench.step(tag)
    bench.now += 61.0
    for tag in ("b", "fixed"):
        bench.step(tag)
    assert numbers(bench.state) == [10, 4]
    assert {each.user_config for each in bench.state.backends.values()} == {None}
    assert [each.capacity for each in bench.state.backends.values()] == [50.0, 50.0]


# ---- in a controller


async def set_to(stage: Stage, percent: float | None) -> None:
    await stage.change("set_target_capacity", percent=percent)


async def explained(stage: Stage, tag: str = "b") -> Explanation:
    return Explanation.of(await stage.call("explain", name=tag))


@staged(workers=3)
async def test_replicas_follow_and_new_backends_have_their_share(stage: Stage) -> None:
    await stage.create(num_replicas=4)
    await set_to(stage, 50)
    await stage.until(lambda: len(stage.running_of("b")) == 2)
    await stage.create("c", num_replicas=6)
    assert len(stage.running_of("c")) == 3
    await stage.update("c", num_replicas=2)
    assert len(stage.running_of("c")) == 1
    status = Status.of(await stage.call("status"))
    assert (status.target_capacity, status.target_capacity_direction) == (50.0, "DOWN")
    assert (status.backends["b"].wanted, status.backends["b"].status) == (2, "HEALTHY")
    assert "The instance has a target capacity of 50 %, DOWN." in str(await explained(stage))
    config = (await stage.call("get_backend_config", tag="b"))["config"]
    assert config["num_replicas"] == 4
    await set_to(stage, None)
    await stage.until(lambda: (len(stage.running_of("b")), len(stage.running_of("c"))) == (4, 2))
    assert Status.of(await stage.call("status")).target_capacity is None


@staged(workers=3)
async def test_it_outlives_the_controller(stage: Stage) -> None:
    await stage.create(num_replicas=4)
    await set_to(stage, 20)
    await set_to(stage, 50)
    await stage.crash_controller()
    await stage.until(lambda: len(stage.running_of("b")) == 2)
    await stage.clock.sleep(10.0)
    status = Status.of(await stage.call("status"))
    assert (status.target_capacity, status.target_capacity_direction) == (50.0, "UP")
    assert len(stage.running_of("b")) == 2
    commits = stage.store.commits
    await set_to(stage, 50)
    assert stage.store.commits == commits


def test_at_nothing_no_request_is_waited_for_and_none_wakes_a_backend() -> None:
    options = {**OPTIONS, "min_replicas": 0, "initial_replicas": 0, "downscale_delay_s": 1.0}

    async def scenario(stage: Stage) -> None:
        await stage.create(autoscaling_config=options)
        assert "off" not in await stage.published("backend/b")
        await set_to(stage, 0)
        assert (await stage.published("backend/b"))["off"]
        await stage.call("report_load", router="r", loads={"b": [3, 0]})
        await stage.clock.sleep(3.0)
        assert not stage.running
        explanation = await explained(stage)
        assert (explanation.wanted, explanation.min_replicas, explanation.max_replicas) == (0, 0, 0)
        await set_to(stage, 10)
        await stage.call("report_load", router="r", loads={"b": [30, 0]})
        await stage.until(lambda: len(stage.running) == 2)  # a tenth of 20

    play(scenario)


def test_the_policy_gets_the_share_of_the_bounds() -> None:
    def least_of_both(context: Any) -> int:
        assert context.capacity_adjusted_min_replicas == context.min_replicas
        assert context.capacity_adjusted_max_replicas == context.max_replicas
        return int(context.min_replicas + context.max_replicas)

    async def scenario(stage: Stage) -> None:
        options = {**OPTIONS, "upscale_delay_s": 0.0, "policy": dump_bytes(least_of_both)}
        await set_to(stage, 20)
        await stage.create(autoscaling_config={**options, "initial_replicas": None})
        await stage.until(lambda: len(stage.running_of("b")) == 4)
        reason = (await explained(stage)).reason
        assert "the policy wants 5" in reason
        assert "4 at most (max_replicas, at a target capacity of 20 %)" in reason

    play(scenario, workers=3)


@staged(workers=3)
async def test_a_change_in_progress_completes_with_the_share(stage: Stage) -> None:
    async def slow(replica: ScriptedReplica) -> None:
        await stage.clock.sleep(3.0)

    stage.start = slow
    await stage.call("create_backend", **stage.spec(num_replicas=4))
    await set_to(stage, 50)
    await stage.until(lambda: len(stage.running_of("b")) == 2)
    await stage.clock.sleep(5.0)
    status = Status.of(await stage.call("status"))
    assert (status.backends["b"].status, status.backends["b"].running) == ("HEALTHY", 2)
    assert status.goals[-1].state == "DONE"


@staged()
async def test_a_backend_whose_replicas_fail_has_none_to_fail_at_nothing(stage: Stage) -> None:
    async def fail(replica: ScriptedReplica) -> None:
        raise ReplicaStartError("no weights", user_traceback="")

    await stage.create(num_replicas=2)
    await set_to(stage, 0)
    await stage.until(lambda: not stage.running)
    stage.start = fail
    await set_to(stage, 100)
    await stage.clock.sleep(2.0)
    assert "no weights" in (await explained(stage)).waiting
    await set_to(stage, 0)
    await stage.clock.sleep(2.0)
    assert Status.of(await stage.call("status")).backends["b"].status == "HEALTHY"


def test_the_logging_of_an_instance_is_changed_until_its_next_start() -> None:
    state = State()
    state.apply(set_target_capacity(state, 50.0, 1.0))
    assert set_logging(state, {}, "s1") == {}
    assert set_logging(state, {"logging_config": None}, "s1") == {}
    change = set_logging(state, {"logging_config": {"log_level": "DEBUG"}}, "s1")
    (record,) = change.values()
    assert isinstance(record, CapacityRecord)
    assert (record.logging, record.logging_of, record.percent) == ({"log_level": "DEBUG"}, "s1", 50.0)
    state.apply(change)
    assert set_logging(state, {"logging_config": {"log_level": "DEBUG"}}, "s1") == {}
    assert set_logging(state, {"logging_config": {"log_level": "DEBUG"}}, "s2") != {}
    assert set_logging(state, {"logging_config": {}}, "s1") != {}
