"""The decorator `multiplexed`: loads, unloads, and their failures."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import itertools
import logging
import pickle
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import cloudpickle
import pytest
from tables import each_case

import daskserve as serve
from daskserve.context import (
    ReplicaContext,
    RequestContext,
    current_members,
    current_replica,
    current_request,
)
from daskserve.data.multiplexing import loader as loader_module
from daskserve.data.multiplexing import unloading
from daskserve.data.multiplexing.multiplexer import Multiplexer
from daskserve.errors import ModelCapacityError, NotInReplicaError, RequestTimeoutError, WrongTypeError
from daskserve.loops.tasks import pause
from daskserve.telemetry.table import SECTIONS
from daskserve.testing import run_virtual

pytestmark = pytest.mark.smoke

DEADLINE_S = 10


class Model:
    """A model that records its end."""

    def __init__(self, model_id: str, unloaded: list[str], nbytes: int = 0) -> None:
        self.id = model_id
        self.nbytes = nbytes
        self._unloaded = unloaded

    def __del__(self) -> None:
        self._unloaded.append(self.id)


class Models:
    """Code with a multiplexed method, whose options each test chooses."""

    def __init__(self, **options: Any) -> None:
        self.loaded: list[str] = []
        self.unloaded: list[str] = []
        #: Loads wait for these; a load of an id without one does not wait.
        self.gates: dict[str, asyncio.Event] = {}
        self.multiplexer = Multiplexer()
        self.sizes: dict[str, int] = {}

        async def get(model_id: str) -> Any:
            self.loaded.append(model_id)
            if model_id in self.gates:
                await self.gates[model_id].wait()
            if model_id.startswith("bad"):
                raise RuntimeError(f"{model_id} is broken")
            return self.make(model_id)

        self.load = get
        self.get: Any = serve.multiplexed(**options)(get)

    def make(self, model_id: str) -> Any:
        return Model(model_id, self.unloaded, self.sizes.get(model_id, 0))

    def ids(self) -> list[str]:
        return sorted(self.multiplexer.facts().get("models", {}))

    def run(self, code: Coroutine[Any, Any, Any]) -> Any:
        """Run code as in a replica."""

        async def inside() -> Any:
            current_replica.set(ReplicaContext("i", "default/d", "default/d#r", multiplexer=self.multiplexer))
            return await asyncio.wait_for(code, DEADLINE_S)

        return asyncio.run(inside())


class Request:
    """A request that holds the models that it uses, within a block."""

    def __init__(self, model_id: str = "") -> None:
        self.context = RequestContext()
        self.context.add_facts({"held": {}, "multiplexed_model_id": model_id})

    def __enter__(self) -> RequestContext:
        self._token = current_request.set(self.context)
        return self.context

    def leave(self) -> None:
        current_request.reset(self._token)

    def end(self) -> None:
        for give_back in vars(self.context).pop("held").values():
            give_back()

    def __exit__(self, *error: object) -> None:
        self.leave()
        self.end()


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await pause()


# ---- the decorator


@each_case(
    ("options", "error", "text"),
    [
        ({"max_num_models_per_replica": "1"}, TypeError, "must be a whole number"),
        ({"max_num_models_per_replica": 1.5}, TypeError, "must be a whole number"),
        ({"max_num_models_per_replica": 0}, ValueError, "at least 1, or -1"),
        ({"max_num_models_per_replica": -2}, ValueError, "at least 1, or -1"),
        ({"max_bytes": 0}, ValueError, "max_bytes must be at least 1"),
        ({"max_bytes": "1GB"}, TypeError, "a whole number, or None"),
        ({"size_of": 3}, TypeError, "size_of must be a function"),
        ({"preload": "abc"}, TypeError, "a list of ids"),
        ({"preload": [""]}, ValueError, "cannot be empty"),
        ({"pinned": ["a", "b", "c", "d"]}, ValueError, "pinned names 4 models, more than"),
        ({"idle_timeout_s": 0}, ValueError, "more than 0 s"),
        ({"load_timeout_s": "5"}, TypeError, "number of seconds"),
    ],
)
def test_bad_options_say_what_is_wrong(options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        serve.multiplexed(**options)


def test_only_async_functions_of_one_argument_are_multiplexed() -> None:
    async def good(model: str) -> None: ...
    async def method(self: Any, model: str) -> None: ...
    def plain(model: str) -> None: ...
    async def none() -> None: ...
    async def alone(self: Any) -> None: ...
    async def three(self: Any, a: str, b: str) -> None: ...

    for function in (good, method):
        assert asyncio.iscoroutinefunction(serve.multiplexed(function))
        assert serve.multiplexed(max_num_models_per_replica=-1)(function)
    for bad in (plain, none, alone, three, Model, 3):
        with pytest.raises(TypeError):
            serve.multiplexed(bad)  # type: ignore[arg-type,type-var]


def test_it_works_only_in_a_replica() -> None:
    @serve.multiplexed
    async def get(model_id: str) -> str:
        return model_id

    async def main() -> None:
        await get("a")

    with pytest.raises(NotInReplicaError, match="can only be used within a deployment"):
        asyncio.run(main())
    assert issubclass(NotInReplicaError, RuntimeError)
    assert serve.get_multiplexed_model_id() == ""


def test_it_is_pickled_with_its_options() -> None:
    class Holder:
        @serve.multiplexed(max_num_models_per_replica=2, pinned=["a"])
        async def get(self, model_id: str) -> Any:
            return self, model_id

    kind = pickle.loads(cloudpickle.dumps(Holder))
    models = Models()

    async def main() -> None:
        holder = kind()
        assert await holder.get("a") == (holder, "a")
        assert await kind.get(holder, "b") == (holder, "b")
        assert await holder.get(model_id="c") == (holder, "c")
        assert await kind().get("b") != (holder, "b")  # each object has its own
        assert kind.get.limits.pinned == ("a",)

    models.run(main())


# ---- loads


def test_a_model_is_loaded_once_and_the_least_recently_used_one_goes() -> None:
    models = Models(max_num_models_per_replica=2)

    async def main() -> None:
        first = await models.get("a")
        assert await models.get("a") is first
        del first
        for model_id in ("b", "a", "c"):
            await models.get(model_id)
        assert models.loaded == ["a", "b", "c"]
        assert models.unloaded == ["b"]  # once, before the next model was loaded
        assert models.ids() == ["a", "c"]

    models.run(main())
    assert models.unloaded == ["b"] or sorted(models.unloaded) == ["a", "b", "c"]
    metrics = models.multiplexer.metrics
    assert (metrics.requests, metrics.hits, metrics.loads, metrics.unloads) == (5, 2, 3, 1)


@each_case("bad", ["", 7, None, b"a"])
def test_bad_ids_are_refused(bad: Any) -> None:
    models = Models()

    async def main() -> None:
        with pytest.raises((TypeError, ValueError)):
            await models.get(bad)
        with pytest.raises(TypeError):
            await models.get()

    models.run(main())


def test_concurrent_requests_for_a_model_share_one_load_and_do_not_delay_others() -> None:
    models = Models(max_num_models_per_replica=3)
    models.gates["slow"] = asyncio.Event()

    async def main() -> None:
        slow = [asyncio.create_task(models.get("slow")) for _ in range(10)]
        await until(lambda: models.loaded == ["slow"])
        assert models.ids() == ["slow"]  # listed before it is loaded
        await models.get("quick")
        assert not any(task.done() for task in slow)
        slow[0].cancel()  # this call began the load, which continues for the others
        models.gates["slow"].set()
        found = await asyncio.gather(*slow[1:])
        assert len(set(map(id, found))) == 1
        assert models.loaded == ["slow", "quick"]

    models.run(main())


def test_the_p99_of_a_loaded_model_is_the_same_while_others_load() -> None:
    models = Models(max_num_models_per_replica=10)
    numbers = itertools.count()

    async def use(model_id: str) -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        with Request(model_id):
            await models.get(model_id)
            await asyncio.sleep(0.01)
        return loop.time() - began

    async def p99(loaders: int) -> float:
        async def load() -> None:
            while True:
                model_id = f"m{next(numbers)}"
                models.gates[model_id] = gate = asyncio.Event()
                asyncio.get_running_loop().call_later(0.2, gate.set)
                await use(model_id)

        tasks = [asyncio.create_task(load()) for _ in range(loaders)]
        found = sorted([await use("cached") for _ in range(400)])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return found[len(found) * 99 // 100]

    async def main() -> None:
        current_replica.set(ReplicaContext("i", "default/d", "default/d#r", multiplexer=models.multiplexer))
        await use("cached")
        assert [await p99(loaders) for loaders in (0, 3, 8)] == pytest.approx([0.01] * 3)
        assert models.loaded.count("cached") == 1

    run_virtual(main)


def test_a_failed_load_fails_its_callers_and_the_next_one_tries_again() -> None:
    models = Models()

    async def main() -> None:
        outcomes = await asyncio.gather(*(models.get("bad") for _ in range(3)), return_exceptions=True)
        assert [str(each) for each in outcomes] == ["bad is broken"] * 3
        assert models.loaded == ["bad"]
        with pytest.raises(RuntimeError, match="bad is broken"):
            await models.get("bad")
        assert models.loaded == ["bad", "bad"]
        assert models.ids() == []

    models.run(main())
    assert models.multiplexer.metrics.failures == 2


def test_concurrent_loads_keep_to_the_limit() -> None:
    models = Models(max_num_models_per_replica=1)
    gate = asyncio.Event()
    models.gates = dict.fromkeys(("1", "2", "3"), gate)

    async def main() -> None:
        tasks = [asyncio.create_task(models.get(each)) for each in ("1", "2", "3")]
        await until(lambda: models.loaded)
        assert models.ids() == ["1", "2", "3"]
        gate.set()
        await asyncio.gather(*tasks)
        assert models.loaded == ["1", "2", "3"]
        assert models.ids() == ["3"]
        await until(lambda: models.unloaded == ["1", "2"])

    models.run(main())


def test_a_load_may_return_nothing() -> None:
    models = Models(max_num_models_per_replica=1)
    models.make = lambda model_id: None  # type: ignore[method-assign]

    async def main() -> None:
        for model_id in ("a", "a", "b", "a"):
            assert await models.get(model_id) is None
        assert models.loaded == ["a", "b", "a"]

    models.run(main())


def test_a_load_without_end_fails_after_its_timeout_and_blocks_nothing() -> None:
    models = Models(max_num_models_per_replica=1, load_timeout_s=0.02)
    models.gates["hangs"] = asyncio.Event()

    async def main() -> None:
        with pytest.raises(
            RequestTimeoutError, match=r"'hangs' was not loaded within load_timeout_s, which is 0.02 s"
        ):
            await models.get("hangs")
        await models.get("a")
        assert models.ids() == ["a"]

    models.run(main())


def test_a_load_forgets_the_callers_that_have_left() -> None:
    models = Models()
    models.gates["slow"] = asyncio.Event()

    async def main() -> None:
        first = asyncio.create_task(models.get("slow"))
        await until(lambda: models.loaded)
        for _ in range(10):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(models.get("slow"), 0.001)
        loader = models.multiplexer.loader(models.load, None, models.get.limits)
        assert len(loader._loads["slow"].waiters) == 1
        models.gates["slow"].set()
        await first

    models.run(main())


def test_a_load_without_waiting_requests_makes_room() -> None:
    models = Models(max_num_models_per_replica=1)
    models.gates["hangs"] = asyncio.Event()

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(models.get("hangs"), 0.01)
        assert models.ids() == ["hangs"]  # it may still be used
        await models.get("a")
        assert models.ids() == ["a"]

    models.run(main())


def test_a_load_that_ignores_its_cancellation_is_unloaded_when_it_ends() -> None:
    models = Models(max_num_models_per_replica=1, load_timeout_s=0.02)
    gate = asyncio.Event()

    async def stubborn(model_id: str) -> Any:
        while not gate.is_set():
            try:
                await gate.wait()
            except asyncio.CancelledError:
                pass
        return models.make(model_id)

    get = serve.multiplexed(max_num_models_per_replica=1, load_timeout_s=0.02)(stubborn)

    async def main() -> None:
        with pytest.raises(RequestTimeoutError):
            await get("a")
        gate.set()
        await until(lambda: models.unloaded == ["a"])

    models.run(main())


def test_a_load_that_raises_cancelled_error_is_a_failure() -> None:
    models = Models()

    def cancelled(model_id: str) -> Any:
        raise asyncio.CancelledError

    models.make = cancelled  # type: ignore[method-assign]

    async def main() -> None:
        with pytest.raises(serve.errors.UserCodeError, match="CancelledError"):
            await models.get("a")

    models.run(main())


def test_functions_of_one_factory_have_models_of_their_own() -> None:
    models = Models()

    def made(kind: str) -> Any:
        @serve.multiplexed
        async def load(model_id: str) -> str:
            return f"{kind} {model_id}"

        return load

    async def main() -> None:
        encoder, decoder = made("encoder"), made("decoder")
        assert [await encoder("a"), await decoder("a")] == ["encoder a", "decoder a"]

    models.run(main())


# ---- models in use


def test_a_model_in_use_is_unloaded_once_no_request_uses_it() -> None:
    models = Models(max_num_models_per_replica=1)

    async def main() -> None:
        first, second = Request(), Request()
        for request in (first, second):
            with_context = request.__enter__()
            assert with_context is request.context
            await models.get("a")
            request.leave()
        waiting = asyncio.create_task(models.get("b"))
        await asyncio.sleep(0)
        first.end()
        await asyncio.sleep(0.01)
        assert models.unloaded == []
        threading.Thread(target=second.end).start()  # requests end on another thread
        await waiting
        assert models.unloaded == ["a"]

    models.run(main())


@pytest.mark.parametrize("limit", [2, 1])
def test_user_code_loads_and_unloads_in_its_replica_whoever_makes_room(limit: int) -> None:
    """A cancelled request ends on the event loop of its worker, outside of the replica's context."""
    models, seen = Models(max_num_models_per_replica=limit), []

    def make(model_id: str) -> Any:
        seen.append(("load", model_id, serve.get_replica_context().replica_tag))
        return model_id

    def unload(model: str) -> None:
        seen.append(("unload", model, serve.get_replica_context().replica_tag))

    models.make = make  # type: ignore[method-assign]
    models.get = serve.multiplexed(max_num_models_per_replica=limit, unload=unload)(models.load)

    async def main() -> None:
        held = [Request(), Request()]
        for request, model in zip(held, "ab", strict=True):
            request.__enter__()
            if model == "a" or limit == 2:
                await models.get(model)
            request.leave()
        waiting = asyncio.create_task(models.get("c"))
        await pause()
        for request in held:
            contextvars.Context().run(request.end)
        assert await waiting == "c"
        await until(lambda: any(each[0] == "unload" for each in seen))

    models.run(main())
    assert {tag for *_, tag in seen} == {"default/d#r"}


def test_requests_that_use_several_models_never_wait_for_each_other() -> None:
    models = Models(max_num_models_per_replica=2)

    async def request(*ids: str) -> None:
        with Request():
            for model_id in ids:
                await models.get(model_id)
                await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(request("a", "b", "c", "d"), request("e", "f", "g"), request("a", "h"))

    models.run(main())
    assert len(models.ids()) == 2


def test_a_request_that_waits_no_longer_for_another_model_keeps_the_one_it_has() -> None:
    models = Models(max_num_models_per_replica=1)

    async def main() -> None:
        stays, ends = Request(), Request()
        for request in (stays, ends):
            request.__enter__()
            await models.get("a")
            request.leave()
        stays.__enter__()
        given_up = asyncio.create_task(models.get("b"))
        stays.leave()
        others = asyncio.create_task(models.get("b"))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.sleep(0)
        ends.end()
        more = asyncio.create_task(models.get("c"))
        await asyncio.sleep(0.005)
        assert models.unloaded == []
        stays.end()
        await asyncio.gather(others, more)
        assert models.unloaded[0] == "a"

    models.run(main())


def test_a_request_that_ends_while_its_code_takes_a_model_holds_nothing() -> None:
    models, request = Models(), Request()

    class EndsNow(dict[Any, Any]):
        def __contains__(self, key: object) -> bool:
            request.end()  # as on another thread
            return False

    async def main() -> None:
        request.context.add_facts({"held": EndsNow()})
        request.__enter__()
        assert (await models.get("a")).id == "a"
        request.leave()
        (loader,) = models.multiplexer._present()
        assert not loader.cache.models["a"].holders
        assert not loader._holding

    models.run(main())


def test_a_request_waits_for_room_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "ROOM_TIMEOUT_S", 0.02)
    models = Models(max_num_models_per_replica=1)

    async def main() -> None:
        request = Request()
        with request:
            await models.get("a")
            request.leave()
            with pytest.raises(ModelCapacityError, match=r"no room for model .* within 0.02 s"):
                await models.get("b")
            request.__enter__()
        await models.get("c")
        assert models.ids() == ["c"], "nothing is left of the request for b"

    models.run(main())
    assert ModelCapacityError.http_status == 503


def test_all_requests_of_a_batch_hold_its_model() -> None:
    models = Models(max_num_models_per_replica=1)

    async def main() -> None:
        requests = [Request("a"), Request("a")]
        current_members.set([each.context for each in requests])
        assert serve.get_multiplexed_model_id() == "a"
        await models.get(serve.get_multiplexed_model_id())
        current_members.set(())
        waiting = asyncio.create_task(models.get("b"))
        for each in requests:
            assert models.unloaded == []
            await asyncio.sleep(0.005)
            each.end()
        await waiting
        assert models.unloaded == ["a"]

    models.run(main())


# ---- sizes, pinned models, idle models


def test_models_are_kept_by_bytes() -> None:
    models = Models(max_num_models_per_replica=-1, max_bytes=100)
    models.sizes = {"a": 40, "b": 40, "c": 40, "huge": 101}

    async def main() -> None:
        for model_id in "abc":
            await models.get(model_id)
        assert models.ids() == ["b", "c"]
        with pytest.raises(ModelCapacityError, match="'huge' has 101 bytes, more than max_bytes"):
            await models.get("huge")
        assert "huge" in models.unloaded

    models.run(main())


@pytest.mark.parametrize("model_id", ["fails", "is too large", "has no size"])
def test_a_refused_load_keeps_nothing_of_the_model_in_memory(
    model_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "daskserve.replica")  # captured records would keep the error
    models, made = Models(max_num_models_per_replica=-1), []

    def size_of(model: Model) -> int:
        if model.id == "has no size":
            raise ValueError(model.id)
        return 101

    @serve.multiplexed(max_num_models_per_replica=-1, max_bytes=100, size_of=size_of)
    async def get(model_id: str) -> Model:
        model = Model(model_id, [])
        made.append(weakref.ref(model))
        if model_id == "fails":
            raise ValueError(model_id)
        return model

    async def main() -> None:
        with pytest.raises((ModelCapacityError, ValueError)):
            await get(model_id)
        await until(lambda: made[0]() is None)  # the task of the load ends after its callers

    gc.collect()
    gc.disable()  # large models would stay until a collection, which their size does not start
    try:
        models.run(main())
    finally:
        gc.enable()


@pytest.mark.parametrize("first", [[], ["small"]], ids=["unknown", "expected to be small"])
def test_a_burst_keeps_to_the_bytes_or_comes_back_to_them(first: list[str]) -> None:
    models = Models(max_num_models_per_replica=-1, max_bytes=100)
    names = [f"large {n}" for n in range(6)]
    models.sizes = {**dict.fromkeys(names, 60), "small": 1}
    most = 0

    async def use(model_id: str) -> None:
        nonlocal most
        with Request():
            await models.get(model_id)
            most = max(most, len(models.loaded) - len(models.unloaded))
            await asyncio.sleep(0.001)

    async def main() -> None:
        for each in first:
            await models.get(each)
        await asyncio.gather(*map(use, names))
        assert bool(first) or most == 1
        (loader,) = models.multiplexer._present()
        await until(lambda: loader.cache._kept_bytes <= 100 and not loader.cache.leaving)

    models.run(main())


def test_a_size_that_is_not_known_is_an_error() -> None:
    models = Models(max_bytes=100)
    models.make = lambda model_id: object()  # type: ignore[method-assign]

    async def main() -> None:
        with pytest.raises(WrongTypeError, match="not known: nbytes of a object is None"):
            await models.get("a")
        assert models.ids() == []

    models.run(main())


def test_preloaded_and_pinned_models_are_there() -> None:
    models = Models(max_num_models_per_replica=2, preload=["a"], pinned=["b"])
    namespace = {"get": models.get}
    exec("def serve_it(request): return get", namespace)

    async def main() -> None:
        assert models.multiplexer.find(namespace["serve_it"])
        await models.multiplexer.preload()
        assert models.loaded == ["a"]
        for model_id in "bcda":
            await models.get(model_id)
        assert models.ids() == ["a", "b"]

    models.run(main())


def test_an_idle_model_is_unloaded() -> None:
    models = Models(idle_timeout_s=0.02, pinned=["pinned"])

    async def main() -> None:
        await models.get("pinned")
        await models.get("a")
        await until(lambda: models.unloaded == ["a"])
        assert models.ids() == ["pinned"]

    models.run(main())


def test_a_model_is_idle_from_when_the_last_request_that_used_it_has_ended() -> None:
    async def main() -> None:
        current_replica.set(ReplicaContext("i", "default/d", "default/d#r", multiplexer=models.multiplexer))
        with Request():
            await models.get("a")
            await asyncio.sleep(100)
        await asyncio.sleep(9)
        assert models.unloaded == []
        await asyncio.sleep(3)
        assert models.unloaded == ["a"]

    models = Models(idle_timeout_s=10)
    run_virtual(main)


def test_the_models_of_an_object_that_is_gone_are_unloaded_after_their_requests() -> None:
    class Helper:
        @serve.multiplexed(pinned=["a"])
        async def get(self, model_id: str) -> Model:
            return Model(model_id, models.unloaded)

    async def main() -> None:
        multiplexer = models.multiplexer
        current_replica.set(ReplicaContext("i", "default/d", "default/d#r", multiplexer=multiplexer))
        with Request():
            for _ in range(20):
                await Helper().get("a")
            await asyncio.sleep(100)
            assert models.unloaded == []
            for name, labels, _ in (samples := multiplexer.samples(("i", "d", "r"))):
                assert len(labels) == len(specs[name].labels), name
            assert samples
        await asyncio.sleep(3)
        assert models.unloaded == ["a"] * 20
        assert not multiplexer.samples(("i", "d", "r"))

    specs = {each.short_name: each for section in SECTIONS.values() for each in section}
    models = Models()
    run_virtual(main)


# ---- unloading


def test_a_model_may_be_unloaded_in_many_ways_and_only_once() -> None:
    ended: list[str] = []

    class Closes:
        def close(self) -> None:
            ended.append(f"close {threading.current_thread().name}")

    class AsyncCloses:
        async def aclose(self) -> None:
            ended.append("aclose")

    class AsyncDel:
        async def __del__(self) -> None:
            ended.append("async del")

    class Del:
        def __del__(self) -> None:
            ended.append("del")

    async def main() -> None:
        for kind in (Closes, AsyncCloses, AsyncDel, Del):
            await unloading.unload(kind(), None, name="m")
        await unloading.unload(Del(), lambda model: ended.append("hook"), name="m")
        await unloading.unload(type, None, name="m")

    asyncio.run(main())
    assert ended == ["close daskserve-unload", "aclose", "async del", "del", "hook"]


class Attributes:
    """Raises the wrong error for a missing attribute."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


def test_a_model_whose_attributes_raise_is_unloaded(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        asyncio.run(unloading.unload(Attributes(), None, name="m"))
    assert "Unloading m failed" in caplog.text
    assert "KeyError: 'aclose'" in caplog.text


def test_an_unload_that_fails_or_hangs_is_logged_and_gives_its_room_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(unloading, "UNLOAD_TIMEOUT_S", 0.02)
    models = Models(max_num_models_per_replica=1)
    never = threading.Event()

    class Hangs:
        def __del__(self) -> None:
            never.wait()

    class Fails:
        def __del__(self) -> None:
            raise SystemExit("dead")

    models.make = lambda model_id: {"hangs": Hangs, "fails": Fails}.get(model_id, object)()  # type: ignore[method-assign]

    async def main() -> None:
        for model_id in ("hangs", "fails", "a"):
            await models.get(model_id)
        assert models.ids() == ["a"]

    with caplog.at_level(logging.WARNING):
        models.run(main())
    never.set()
    assert "Unloading model 'hangs' of" in caplog.text
    assert "takes more than 0.02 s" in caplog.text
    assert "Unloading model 'fails' of" in caplog.text


def test_an_object_with_two_ids_is_unloaded_with_the_last_one() -> None:
    models = Models(max_num_models_per_replica=2)
    shared = Model("shared", models.unloaded)
    models.make = lambda model_id: shared  # type: ignore[method-assign]

    async def main() -> None:
        for model_id in ("a", "b", "c"):
            await models.get(model_id)
        assert models.unloaded == []

    models.run(main())


def test_closing_unloads_all_models_and_ends_loads() -> None:
    models = Models()
    models.gates["slow"] = asyncio.Event()

    async def main() -> None:
        await models.get("a")
        slow = asyncio.create_task(models.get("slow"))
        await until(lambda: "slow" in models.loaded)
        await models.multiplexer.close()
        assert models.unloaded == ["a"]
        with pytest.raises(serve.errors.ClosedError):
            await slow
        with pytest.raises(serve.errors.ClosedError):
            await models.get("b")

    models.run(main())


def test_thousands_of_ids_are_no_problem() -> None:
    models = Models(max_num_models_per_replica=-1)
    models.make = lambda model_id: model_id  # type: ignore[method-assign]

    async def main() -> None:
        await asyncio.gather(*(models.get(f"m{number}" + "x" * 100) for number in range(2000)))
        facts = models.multiplexer.facts()
        assert facts["count"] == 2000
        assert len(facts["models"]) == 1000
        assert len(models.multiplexer.samples(("i", "d", "r"))) < 120

    models.run(main())


def test_a_load_whose_event_loop_has_ended_begins_on_that_of_another_caller() -> None:
    models = Models(max_num_models_per_replica=1)

    def wait_in_vain() -> None:
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(models.get("b"), 0.2))

    async def main() -> None:
        with Request() as request:
            await models.get("a")  # this leaves no room for b
            current_request.set(None)
            first = asyncio.create_task(asyncio.to_thread(wait_in_vain))
            await until(lambda: "b" in models.ids())
            waiting = asyncio.create_task(models.get("b"))
            await first
            current_request.set(request)
        await waiting
        await until(lambda: models.unloaded == ["a"])
        assert models.ids() == ["b"]

    models.run(main())


def test_threads_with_loops_of_their_own_share_the_models() -> None:
    models = Models()

    async def main() -> None:
        import contextvars

        loops = [contextvars.copy_context() for _ in range(4)]
        found = await asyncio.gather(
            *(asyncio.to_thread(each.run, lambda: asyncio.run(models.get("a"))) for each in loops)
        )
        assert len(set(map(id, found))) == 1
        assert await models.get("a") is found[0]

    models.run(main())
