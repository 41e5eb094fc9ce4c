"""A controller while another instance owns the store: during its start, and after a takeover."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from controller_harness import ScriptedStore, Stage, play

from daskserve.cluster.protocols.base import StoreChange
from daskserve.cluster.protocols.stores import StoreOwnership
from daskserve.errors import RequestTimeoutError, StaleEpochError, StoreTakenError, UnavailableError
from daskserve.options.http import HTTPOptions
from daskserve.testing import run_virtual


class SharedRecords(ScriptedStore):
    """A store whose owner a test sets; the other cluster has made the changes ``changed`` meanwhile."""

    def __init__(
        self, records: Mapping[str, bytes] | None = None, hold: StoreOwnership = StoreOwnership.TRIAL
    ) -> None:
        super().__init__()
        self._records = dict(records or {})
        self.held = hold
        self.changed: dict[str, bytes | None] = {}
        self.refusal: StoreTakenError | None = None
        self.mistakes: list[Exception] = []
        self.asked: list[bool] = []

    @property
    def ownership(self) -> StoreOwnership:
        return self.held

    def problems(self) -> Mapping[str, str]:
        return {"store": "Another cluster has it."} if self.held is StoreOwnership.TAKEN else {}

    async def take_over(
        self, epoch: int, *, is_complete: bool, own: Sequence[str]
    ) -> Mapping[str, bytes | None] | None:
        assert set(own) == {"replica/", "proxy/"}
        self.asked.append(is_complete)
        if self.refusal is not None:
            raise self.refusal
        if self.mistakes:
            raise self.mistakes.pop()
        if not is_complete:
            return None
        self.held = StoreOwnership.HELD
        await super().commit(epoch, StoreChange(self.changed))
        return self.changed


def left_by_another_cluster() -> dict[str, bytes]:
    store = ScriptedStore()

    async def serve(stage: Stage) -> None:
        await stage.create("b", num_replicas=2)
        await stage.create("c")

    play(serve, store=store)
    return dict(store.data)


def test_the_store_is_taken_over_when_everything_runs_with_what_has_changed_meanwhile() -> None:
    store = SharedRecords(left_by_another_cluster())
    store.changed = {"backend/c": None, "backend/never": None}

    async def main() -> None:
        stage = Stage(store=store)
        stage.start_s = 3.0
        async with stage.cluster:
            began = stage.clock.now()
            await stage.open()
            await stage.until(lambda: True in store.asked)
            assert stage.clock.now() >= began + 3
            # Until then, it asks periodically, because the owner may be dead.
            assert 2 <= store.asked.count(False) < 20
            assert len(stage.running_of("b")) == 2
            await stage.until(lambda: not stage.running_of("c"))
            assert not [key for key in stage.stored("replica") if key.startswith("replica/c#")]
            status = await stage.call("status")
            assert "c" not in status["backends"]
            assert status["owns_store"]
            await stage.create("d")

    run_virtual(main)


def test_an_unexpected_error_does_not_end_the_attempts() -> None:
    store = SharedRecords()
    store.mistakes = [ValueError("no record")]

    async def main() -> None:
        stage = Stage(store=store)
        async with stage.cluster:
            await stage.open()
            await stage.until(lambda: store.held is StoreOwnership.HELD)

    run_virtual(main)


def test_a_controller_that_has_been_replaced_leaves_the_store_to_the_newer_one() -> None:
    store = SharedRecords()
    store.mistakes = [StaleEpochError("epoch 1 was replaced by 2")]

    async def main() -> None:
        stage = Stage(store=store)
        async with stage.cluster:
            await stage.open()
            await stage.until(lambda: store.asked)
            await stage.clock.sleep(60)
            assert len(store.asked) == 1
            assert store.held is StoreOwnership.TRIAL

    run_virtual(main)


def test_a_start_that_ends_without_the_store_says_why_it_could_not_take_it() -> None:
    store = SharedRecords()
    store.mistakes = [UnavailableError("the disk is full")] * 100

    async def scenario(stage: Stage) -> None:
        with pytest.raises(RequestTimeoutError, match="did not serve within 5 s: the disk is full"):
            await stage.call("wait_for_http", timeout_s=5.0)

    play(scenario, store=store)


def test_a_start_fails_if_another_cluster_was_faster() -> None:
    store = SharedRecords()
    store.refusal = StoreTakenError("faster")

    async def scenario(stage: Stage) -> None:
        with pytest.raises(StoreTakenError, match="faster"):
            await stage.call("wait_for_http", timeout_s=5.0)
        assert not (await stage.call("status"))["owns_store"]
        assert len(store.asked) == 1

    play(scenario, store=store, http=HTTPOptions())


def test_a_start_says_what_it_waits_for() -> None:
    store = SharedRecords(left_by_another_cluster())

    async def main() -> None:
        stage = Stage(store=store)
        stage.start_s = 100.0
        async with stage.cluster:
            await stage.open()
            with pytest.raises(RequestTimeoutError, match="not all replicas run, and the instance that has"):
                await stage.call("wait_for_http", timeout_s=5.0)

    run_virtual(main)


def test_an_instance_whose_store_was_taken_refuses_changes_and_replaces_what_dies() -> None:
    store = SharedRecords(hold=StoreOwnership.HELD)

    async def scenario(stage: Stage) -> None:
        await stage.create("b")
        store.held = StoreOwnership.TAKEN
        began = stage.clock.now()
        with pytest.raises(StoreTakenError, match="Another cluster has it"):
            await stage.create("c")
        # An update is refused as well.
        with pytest.raises(StoreTakenError):
            await stage.update("b")
        assert stage.clock.now() == began, "at once"
        (before,) = stage.running_of("b")
        stage.cluster.add_worker()
        stage.cluster.remove_worker(before.worker)
        await stage.until(lambda: stage.running_of("b") not in ([], [before]))
        status = await stage.call("status")
        assert not status["owns_store"]
        assert status["problems"]["store"] == "Another cluster has it."
        controller = await stage.cluster.program.controller()
        await stage.cluster.program.call(controller, "ping", store={})
        assert await stage.published("store_taken") is True
        store.held = StoreOwnership.HELD
        await stage.cluster.program.call(controller, "ping", store={})
        assert await stage.published("store_taken") is None
        await stage.create("c")

    play(scenario, store=store)
