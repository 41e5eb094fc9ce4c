"""Request routers: the choices of the built-in routers, and failures of users' routers."""

from __future__ import annotations

import asyncio
import copy
import logging
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tables import each_case

from daskserve.common.types import ActorAddress, Envelope, EnvelopeKind, Load
from daskserve.data.caller.pool.pooled_replica import PooledReplica
from daskserve.data.caller.pool.replica_pool import ReplicaPool
from daskserve.data.caller.request_routers import thread
from daskserve.data.caller.request_routers.hashing import Ring, hash_of
from daskserve.data.caller.request_routers.interface import DeploymentID, RequestMetadata, Setup
from daskserve.data.caller.request_routers.loading import BUILT_IN, load_router
from daskserve.data.caller.request_routers.prefixes import MAX_BEGINNINGS, beginnings_of, prompt_in
from daskserve.data.caller.request_routers.routing import RequestRouting
from daskserve.data.caller.sessions import session_in
from daskserve.payload.pickling import dump
from daskserve.request_router import (
    FIFOMixin,
    LocalityMixin,
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)
from daskserve.testing import run_virtual


class Stage:
    """A pool of replicas, a router, and requests that the test ends."""

    def __init__(self, router: str, replicas: int = 4, concurrency: int = 100, **kwargs: Any) -> None:
        self.pool = ReplicaPool(lambda _: False)
        self.concurrency = concurrency
        self.have(*(f"r{number}" for number in range(replicas)))
        self.routing = RequestRouting(
            Setup(router, kwargs),
            "a/d",
            self.pool,
            random.Random(1),
            "10.0.0.1",
        )
        self.open: list[tuple[PooledReplica, Envelope]] = []

    def have(self, *tags: str) -> None:
        published = {tag: (f"tcp://10.0.0.{tag[1:]}:1", 1) for tag in tags}
        self.pool.update(published, self.concurrency, "i/replica/{}".format)

    def take(self, envelope: Envelope | None = None, body: bytes = b"") -> str | None:
        """Send a request; return the tag of its replica, or None if it has to wait."""
        envelope = envelope or call()
        self.routing.request_of(envelope).body = body
        found = self.routing.take(envelope, asyncio.get_running_loop().time())
        if found is None:
            return None
        self.open.append((found, envelope))
        return str(found.tag)

    def end(self, number: int = 0, outcome: Load | Exception | None = Load()) -> None:  # noqa: B008  # it is frozen
        replica, envelope = self.open.pop(number)
        self.routing.ended(envelope, asyncio.get_running_loop().time(), outcome)
        self.pool.release(replica)

    def ask(self, envelope: Envelope | None = None, body: bytes = b"") -> str | None:
        """Send a request that ends at once."""
        found = self.take(envelope, body)
        if found is not None:
            self.end(-1)
        return found


def call(session: str = "", *args: Any, **facts: Any) -> Envelope:
    facts |= {"session_id": session} if session else {}
    head = {"method": "__call__", "request_id": "id", "facts": facts}
    return Envelope(EnvelopeKind.CALL, head, dump((args, {})))


def get(*headers: tuple[bytes, bytes]) -> Envelope:
    return Envelope(EnvelopeKind.HTTP, {"type": "http", "method": "GET", "headers": list(headers)})


# ---- what routers are told


def test_a_request_says_what_it_is_in_the_same_words_for_http_and_for_calls() -> None:
    facts = {"route": "/a", "model_id": "m", "request_id": "of the request"}
    called = RequestMetadata(call("s", **facts), "s")
    head = {"type": "http", "method": "PUT", "path": "/a/b", "headers": [(b"a", b"b")]}
    asked = RequestMetadata(Envelope(EnvelopeKind.HTTP, {**head, "extensions": {"daskserve": facts}}), "")
    names = (
        "is_http_request request_id internal_request_id call_method route multiplexed_model_id is_streaming "
        "method path headers session_id"
    ).split()
    assert [getattr(called, each) for each in names] == [
        False,
        "id",
        "id",
        "__call__",
        "/a",
        "m",
        False,
        "",
        "",
        (),
        "s",
    ]
    assert [getattr(asked, each) for each in names] == [
        True,
        "of the request",
        "of the request",
        "__call__",
        "/a",
        "m",
        False,
        "PUT",
        "/a/b",
        [(b"a", b"b")],
        "",
    ]
    streaming = RequestMetadata(Envelope(EnvelopeKind.CALL, {"method": "go", "stream": True}), "")
    assert (streaming.call_method, streaming.is_streaming, streaming.route) == ("go", True, "")
    bare = RequestMetadata(Envelope(EnvelopeKind.HTTP, {"type": "http"}), "")
    assert (bare.request_id, bare.method, bare.path, bare.headers, bare.multiplexed_model_id) == (
        "",
        "",
        "",
        (),
        "",
    )
    one, alone = DeploymentID.of("shop/cart"), DeploymentID.of("cart")
    assert (one, str(one), alone, str(alone)) == (
        DeploymentID("cart", "shop"),
        "shop/cart",
        DeploymentID("cart"),
        "cart",
    )
    replica = ReplicaID("cart#1", one)
    assert str(replica) == replica.to_full_id_str() == "cart#1"


@each_case(
    ("router", "options", "message"),
    [
        (
            "ConsistentHash",
            {"virtual_nodes": 0},
            "virtual_nodes must be a whole number from 1 to 10000, got 0",
        ),
        ("ConsistentHash", {"num_virtual_nodes": 10_001}, "virtual_nodes must be .* got 10001"),
        ("ConsistentHash", {"virtual_nodes": 1.5}, "virtual_nodes must be .* got 1.5"),
        ("ConsistentHash", {"bound": 1}, "bound must be more than 1, got 1"),
        ("ConsistentHash", {"bound": "2"}, "bound must be more than 1, got '2'"),
        ("ConsistentHash", {"fallback_replicas": -1}, "fallback_replicas must be .* from 0, got -1"),
        ("ConsistentHash", {"num_fallback_replicas": 0.5}, "fallback_replicas must be .* got 0.5"),
        ("LeastLatency", {"choices": 0}, "choices must be a whole number from 1, got 0"),
        ("LeastLatency", {"choices": 1.0}, "choices must be a whole number from 1, got 1.0"),
        ("LeastLatency", {"weight": 0}, "weight must be above 0 and up to 1, got 0"),
        ("LeastLatency", {"weight": 1.1}, "weight must be above 0 and up to 1, got 1.1"),
        ("PrefixAffinity", {"imbalance": 1}, "PrefixAffinity has no option 'imbalance'"),
        ("PrefixAffinity", {"imbalanced_threshold": -1}, "imbalanced_threshold must not be negative, got -1"),
        (
            "PrefixAffinity",
            {"match_rate_threshold": 1.1},
            "match_rate_threshold must be from 0 to 1, got 1.1",
        ),
        ("PrefixAffinity", {"match_rate_threshold": -0.1}, "match_rate_threshold must be from 0 to 1"),
        ("PrefixAffinity", {"max_beginnings": 0}, "max_beginnings must be a whole number from 1, got 0"),
        ("PrefixAffinity", {"max_beginnings": 2.0}, "max_beginnings must be .* got 2.0"),
        ("ConsistentHash", {"virtual_nodes": 1, "bound": 1.01, "fallback_replicas": 0}, ""),
        ("ConsistentHash", {"num_virtual_nodes": 10_000, "bound": float("inf")}, ""),
        ("LeastLatency", {"choices": 1, "weight": 1}, ""),
        ("PrefixAffinity", {"imbalanced_threshold": 0, "match_rate_threshold": 0, "max_beginnings": 1}, ""),
        (
            "PrefixAffinity",
            {"match_rate_threshold": 1, "do_eviction": True, "eviction_threshold_chars": 1},
            "",
        ),
    ],
)
def test_the_options_of_the_built_in_routers_have_limits(
    router: str, options: dict[str, Any], message: str
) -> None:
    made = BUILT_IN[router].__new__(BUILT_IN[router])
    if not message:
        made.initialize_state(**options)
        return
    with pytest.raises((TypeError, ValueError), match=message):
        made.initialize_state(**options)


def test_classes_that_are_no_routers_are_refused() -> None:
    for path, message in (
        ("collections:Counter", "is not a class with a method choose_replicas"),
        ("json:dumps", "is not a class with a method choose_replicas"),
        (f"{__name__}:Stranger", "Stranger does not derive from daskserve.request_router.RequestRouter"),
    ):
        with pytest.raises(TypeError, match=message):
            load_router(path)


class Stranger:
    def choose_replicas(self, *_: Any) -> Any: ...


# ---- the built-in routers


async def test_round_robin_passes_over_replicas_without_room() -> None:
    stage = Stage("RoundRobin", 3, concurrency=2)
    assert Counter(stage.ask() for _ in range(30)) == {"r0": 10, "r1": 10, "r2": 10}
    assert Counter(stage.take() for _ in range(6)) == {"r0": 2, "r1": 2, "r2": 2}
    assert stage.take() is None
    stage.end(3)
    assert stage.take() is not None


async def test_a_session_stays_with_its_replica_in_every_process_and_sessions_are_spread() -> None:
    one, other = Stage("ConsistentHash", 8), Stage("ConsistentHash", 8)
    chosen = {f"s{n}": one.ask(call(f"s{n}")) for n in range(800)}
    assert all(other.ask(call(each)) == tag == one.ask(call(each)) for each, tag in chosen.items())
    assert all(50 <= count <= 160 for count in Counter(chosen.values()).values())
    assert {one.ask(get((b"x-session-id", b"s1"))) for _ in range(5)} == {chosen["s1"]}
    assert len({one.ask() for _ in range(50)}) == 8  # without a session


async def test_most_sessions_stay_while_replicas_come_and_go() -> None:
    stage, sessions = Stage("ConsistentHash", 10), [f"s{n}" for n in range(500)]
    names = [f"r{number}" for number in range(10)]
    for step in range(20):
        before = {each: stage.ask(call(each)) for each in sessions}
        gone, names = names[0], [*names[1:], f"r{10 + step}"]
        stage.have(*names)
        moved = [each for each in sessions if stage.ask(call(each)) != before[each]]
        # The sessions of the removed replica, and the sessions that the new replica gets.
        assert len(moved) < 2.6 * len(sessions) / len(names)
        assert {each for each in sessions if before[each] == gone} <= set(moved)


async def test_no_replica_has_more_than_its_share_of_a_session_that_is_everybodys() -> None:
    stage = Stage("ConsistentHash", 8)
    for sent in range(1, 401):
        stage.take(call("same"))
        assert max(each.in_flight for each in stage.pool.entries().values()) <= -(-1.25 * sent // 8)
    assert len({replica.tag for replica, _ in stage.open}) >= 7


async def test_without_a_bound_a_session_stays_with_its_replica_until_that_is_full() -> None:
    stage = Stage("ConsistentHash", 3, concurrency=20, bound=float("inf"))
    assert len({stage.take(call("same")) for _ in range(20)}) == 1
    assert len({stage.take(call("same")) for _ in range(20)}) == 1  # the next replica on the ring
    assert len({replica.tag for replica, _ in stage.open}) == 2


async def test_a_session_may_be_bound_to_few_replicas_and_then_waits_for_them() -> None:
    stage = Stage("ConsistentHash", 8, concurrency=1, fallback_replicas=1)
    first = [stage.take(call("same")) for _ in range(3)]
    assert first[2] is None
    assert len({*first}) == 3
    assert stage.take(call("other")) is not None
    stage.end(0)
    assert stage.take(call("same")) == first[0]


@each_case(("options", "latency_s"), [({}, 0.82), ({"weight": 0.5}, 0.55), ({"weight": 1}, 0.1)])
def test_the_weight_of_the_newest_request_is_an_option(options: dict[str, Any], latency_s: float) -> None:
    async def scenario() -> float:
        stage = Stage("LeastLatency", 1, **options)
        for took_s in (1.0, 0.1):
            stage.take()
            await asyncio.sleep(took_s)
            stage.end()
        return stage.routing._replicas[0].latency_s

    assert run_virtual(scenario) == pytest.approx(latency_s)


async def test_the_faster_replicas_get_more() -> None:
    stage = Stage("LeastLatency", 4)
    for _ in stage.pool.entries():
        stage.ask()
    while len(stage.routing._known) < 4 or not all(r.latency_s for r in stage.routing._replicas):
        stage.ask()
    for replica in stage.routing._replicas:
        replica.latency_s = 1.0 if replica.replica_id.unique_id == "r0" else 0.01
    chosen = []
    for _ in range(300):
        chosen.append(stage.take())
        stage.open.pop()
    assert 0 < Counter(chosen)["r0"] < 40


PROMPTS = [f"You are the assistant number {n}. " + "Be brief. " * 40 for n in range(12)]


async def test_prompts_that_begin_alike_go_where_they_began() -> None:
    stage = Stage("PrefixAffinity", 4)
    for prompt in PROMPTS:
        homes = {stage.ask(call("", {"prompt": f"{prompt} Question {n}"})) for n in range(6)}
        assert len(homes) == 1
    bodies = [
        b'{"user": "%d", "messages": [{"role": "user", "content": "%s%d"}]}' % (n, b"x" * 400, n)
        for n in range(6)
    ]
    assert len({stage.ask(get(), body) for body in bodies}) == 1
    deep = b'{"prompt": ' + b"[" * 20_000
    assert len({stage.ask(get(), deep) for _ in range(6)}) == 1
    assert not stage.routing.errors.text


def test_prompts_are_compared_at_both_ends_of_their_blocks_up_to_their_length() -> None:
    text = "".join(random.Random(1).choices("abcdefgh", k=40_000))
    names = beginnings_of(text)

    def common(other: str) -> float:
        found = beginnings_of(other)
        alike = [one == two for one, two in zip(names, found, strict=False)]
        assert alike == sorted(alike, reverse=True)  # after the first difference, nothing matches again
        return sum(alike) / len(names)

    shares = [common(text[:at] + "X" + text[at + 1 :]) for at in (0, 63, 64, 700, 2_592, 29_524, 32_767)]
    assert shares[:2] == [0, 0]
    assert shares == sorted(shares)
    assert 0.9 < shares[-1] < 1
    assert (
        common(text[:24_000] + "X" + text[24_001:])
        == common(text[:32_768] + "X")
        == common(text[:32_768])
        == 1
    )
    assert beginnings_of("a" * 300)[:-1] == beginnings_of("a" * 3_000)[:4]
    assert beginnings_of("a" * 2_000)[-1] not in beginnings_of("a" * 3_000)
    assert 0.5 < common(text[:9_000]) < 1
    assert beginnings_of(text[:100])[:1] == names[:1]
    assert common(text[:100]) == 1 / len(names)


async def test_prompts_leave_a_replica_that_is_busier_than_others_and_one_that_is_gone() -> None:
    stage = Stage("PrefixAffinity", 4, imbalanced_threshold=3)
    home = stage.take(call("", PROMPTS[0]))
    for _ in range(20):
        stage.take(call("", PROMPTS[0]))
    assert len({replica.tag for replica, _ in stage.open}) > 1
    while stage.open:
        stage.end()
    stage.have(*(tag for tag in stage.pool.entries() if tag != home))
    assert len({stage.ask(call("", PROMPTS[0])) for _ in range(5)}) == 1


@pytest.mark.parametrize("replicas", [2, 4])
async def test_prompts_leave_a_replica_that_other_processes_keep_busy(replicas: int) -> None:
    stage = Stage("PrefixAffinity", replicas, imbalanced_threshold=2)
    for prompt in PROMPTS:
        home = stage.ask(call("", prompt))
        assert home is not None
        stage.pool.report(stage.pool.entries()[home], Load(11), asyncio.get_running_loop().time())
        assert stage.ask(call("", prompt)) != home
        for entry in stage.pool.entries().values():
            stage.pool.report(entry, Load(), asyncio.get_running_loop().time())


async def test_known_beginnings_are_bounded() -> None:
    stage = Stage("PrefixAffinity", 4, max_beginnings=100)
    for n in range(200):
        stage.ask(call("", f"{n} " * 500))
    router: Any = stage.routing._router
    assert len(router._young) + len(router._old) <= 100 < MAX_BEGINNINGS


class NoTruth:
    """An array of more than one number, or an object whose attributes cannot be read."""

    def __bool__(self) -> bool:
        raise ValueError("The truth value of an array is ambiguous")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


@each_case(
    ("value", "text"),
    [
        ("plain", "plain"),
        ({"prompt": "p"}, "p"),
        ({"messages": [{"role": "user", "content": "c"}, "d"]}, "user: c\nd"),
        ({"prompt": 3}, ""),
        ({"prompt": [], "inputs": NoTruth(), "text": "t"}, "t"),
        (NoTruth(), ""),
        (None, ""),
        (PendingRequest, ""),
    ],
)
def test_the_prompt_of_an_argument(value: Any, text: str) -> None:
    assert prompt_in(value) == text


@each_case(
    ("place", "headers", "session"),
    [
        ("header:X-Session-Id", [(b"x-session-id", b"a")], "a"),
        ("header:X-Session-Id", [(b"x-session-id", b"\xff" * 10_000)], "\xff" * 1024),
        ("cookie:sid", [(b"cookie", b"a=b; sid=c")], "c"),
        ("cookie:sid", [(b"cookie", b'prefs={"a":1}; b[0]=d; sid="c"')], "c"),
        ("cookie:sid", [(b"cookie", b"\x00;;=;")], ""),
        ("cookie:sid", [], ""),
    ],
)
def test_the_session_of_a_request(place: str, headers: list[tuple[bytes, bytes]], session: str) -> None:
    assert session_in(headers, place) == session


async def test_a_thousand_replicas_cost_no_more_per_request_than_ten() -> None:
    ring = Ring(100)
    ring.update({f"r{n}" for n in range(1000)})
    assert len(list(ring.walk(hash_of("x")))) == 1000
    stage = Stage("ConsistentHash", 1000)
    looked_at = Counter[str]()
    for n in range(100):
        looked_at[str(stage.ask(call(f"s{n}")))] += 1
    assert len(looked_at) > 80


async def test_replicas_on_this_host_are_taken_first() -> None:
    stage = Stage("SameHost", 4, concurrency=2)
    assert [stage.take() for _ in range(2)] == ["r1", "r1"]
    assert Counter(stage.take() for _ in range(6)) == {"r0": 2, "r2": 2, "r3": 2}


# ---- routers of the user


class Custom(RequestRouter):
    """A router with functions that the test sets."""

    answer: Callable[[list[RunningReplica], PendingRequest], Any]

    def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> Any:
        assert pending_request is not None
        return type(self).answer(candidate_replicas, pending_request)


PATH = f"{__name__}:Custom"


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])

    def answers(function: Any) -> None:
        monkeypatch.setattr(Custom, "answer", staticmethod(function), raising=False)

    return answers


async def custom(path: str = PATH, **kwargs: Any) -> Stage:
    """Return a stage whose router is loaded, or cannot be loaded."""
    stage = Stage(path, **kwargs)
    async with asyncio.timeout(20):
        while stage.routing._router is None and not stage.routing.errors.text:  # noqa: ASYNC110  # no event tells
            await asyncio.sleep(0.001)
    return stage


async def test_a_router_of_the_user_chooses(answers: Any) -> None:
    # It may change the list.
    answers(lambda replicas, request: [[replicas.pop(2)], replicas])
    stage = await custom(concurrency=2)
    assert [stage.take() for _ in range(2)] == ["r2", "r2"]
    others = Counter(stage.take() for _ in range(7))
    assert others == {"r0": 2, "r1": 2, "r3": 2, None: 1}
    assert stage.routing.errors.fallbacks == {}
    stage.routing.close()


async def choose_first(replicas: list[RunningReplica], request: PendingRequest) -> Any:
    return [[replicas[0]]]


async def choose_first_later(replicas: list[RunningReplica], request: PendingRequest) -> Any:
    await asyncio.sleep(0)
    return [[replicas[0]]]


@pytest.mark.parametrize("function", [choose_first, choose_first_later])
async def test_it_may_be_async(function: Any, answers: Any) -> None:
    answers(function)
    stage = await custom()
    assert [stage.ask() for _ in range(3)] == ["r0"] * 3
    stage.routing.close()


async def test_a_copy_of_a_replica_stands_for_the_replica(answers: Any) -> None:
    answers(lambda replicas, request: [[copy.copy(replicas[2])]])
    stage = await custom()
    assert stage.ask() == "r2"
    stage.routing.close()


def _raise(replicas: Any, request: Any) -> Any:
    raise SystemExit("out")


def _fail_anew(replicas: Any, request: Any) -> Any:
    raise KeyError(f"session {request.created_at} {id(request)}")


def _endless(replicas: Any, request: Any) -> Any:
    while True:
        yield from [[object()]] * 100


@pytest.mark.parametrize(
    ("function", "kind", "text"),
    [
        (_raise, "error", "raised SystemExit: out"),
        (_fail_anew, "error", "raised KeyError: 'session "),
        (lambda r, q: r.gone, "error", "AttributeError"),
        (lambda r, q: None, "answer", "returned NoneType, which is not a list of lists"),
        (lambda r, q: r, "answer", "RunningReplica"),
        (lambda r, q: [["r1"]], "answer", "chose 'r1', which is not a replica"),
        (_endless, "answer", "which is no"),
    ],
)
async def test_a_router_that_fails_is_reported_once_and_requests_continue(
    function: Any, kind: str, text: str, answers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    answers(function)
    stage = await custom()
    (received,) = {stage.routing.errors.text for _ in range(20) if stage.ask()}  # a change is an event
    assert stage.routing.errors.fallbacks == {kind: 20}
    assert text in received
    assert [each.levelno for each in caplog.records if each.name == "daskserve.router"] == [logging.ERROR]
    stage.routing.close()


async def test_a_router_that_hangs_is_left_alone_and_asked_again(
    answers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread, "ANSWER_S", 0.02)
    monkeypatch.setattr(thread, "PENALTY_S", 0.01)
    hangs = True

    def answer(replicas: list[RunningReplica], request: PendingRequest) -> Any:
        while hangs:
            time.sleep(0.001)
        return [[replicas[1]]]

    answers(answer)
    stage = await custom()
    began = time.perf_counter()
    assert all(stage.ask() for _ in range(100))
    assert time.perf_counter() - began < 1
    assert "has not answered within" in stage.routing.errors.text
    hangs = False
    async with asyncio.timeout(20):
        while stage.ask() != "r1" or stage.ask() != "r1":  # noqa: ASYNC110  # no event tells
            await asyncio.sleep(0.005)
    stage.routing.close()


async def test_a_router_that_was_late_long_ago_is_left_alone_no_longer_than_at_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(thread, "stopwatch", lambda: now)
    monkeypatch.setattr(thread, "ANSWER_S", 0.001)
    runner, go = thread.RouterThread("test"), threading.Event()

    def left_alone_s() -> float:
        go.clear()
        with pytest.raises(thread.RouterError):
            runner.ask(go.wait)
        go.set()
        while not runner._late.is_done:  # type: ignore[union-attr]
            time.sleep(0.001)
        return runner._not_before - now

    assert [left_alone_s() for _ in range(9)] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    now += 60 + thread.MAX_PENALTY_S
    assert [left_alone_s() for _ in range(2)] == [1, 2]
    runner.close()


class BadStart(RequestRouter):
    def initialize_state(self, **kwargs: Any) -> None:
        raise ValueError("bad start")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("nowhere:Router", "there is no module 'nowhere'"),
        (f"{__name__}:Stage", "not a class with a method choose_replicas"),
        (f"{__name__}:BadStart", "bad start"),
    ],
)
async def test_a_router_that_cannot_be_loaded_is_reported(path: str, text: str, answers: Any) -> None:
    stage = await custom(path)
    assert text in stage.routing.errors.text
    assert stage.ask()
    assert stage.routing.errors.fallbacks == {"load": 1}
    stage.routing.close()


async def test_a_router_that_names_no_replica_is_asked_again_after_growing_times(answers: Any) -> None:
    answers(lambda replicas, request: [])
    stage = await custom()
    pauses = []
    for _ in range(8):
        assert stage.take() is None
        assert stage.routing.ask_again_at is not None
        pauses.append(round(stage.routing.ask_again_at - asyncio.get_running_loop().time(), 2))
    assert pauses[0] == pytest.approx(0.025, abs=0.011)
    assert pauses[-1] == pytest.approx(0.5, abs=0.02)
    stage.routing.close()


class Noting(FIFOMixin, MultiplexMixin, LocalityMixin, RequestRouter):
    """Records its calls; written as for Ray Serve."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.received: list[Any] = []

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        assert pending_request is not None
        model_id = pending_request.metadata.multiplexed_model_id
        if model_id:
            ids = self.apply_multiplex_routing(pending_request=pending_request)
        else:
            ids = self.apply_locality_routing(pending_request=pending_request)
        ranks = self.rank_replicas_via_locality([self.curr_replicas[each] for each in ids])
        ranked = [each for rank in ranks for each in rank]
        best = self.select_available_replicas(
            sorted(ranked, key=lambda each: each.routing_stats.get("load", 0))
        )
        return [best[:1], *self.rank_replicas_via_multiplex(candidate_replicas, model_id)]

    def on_request_routed(self, pending_request: Any, replica_id: ReplicaID, result: Any) -> None:
        self.received.append(
            ("routed", replica_id.unique_id, pending_request.metadata.request_id, *pending_request.args)
        )

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self.received.append(("completed", replica_id.unique_id, internal_request_id))


async def test_a_router_written_for_ray_serve_has_its_methods_and_callbacks() -> None:
    stage = await custom(f"{__name__}:Noting")
    stage.ask()
    stage.routing.note_stats({"r0": {"load": 5}, "r1": {"load": 5}, "r2": {"load": 1}, "r3": {"load": 5}})
    assert {stage.ask(call("", "x")) for _ in range(5)} == {"r1"}  # on this host
    assert stage.ask(call("", multiplexed_model_id="m")) is not None
    stage.routing.show_models(lambda tag: frozenset({"m"} if tag == "r3" else ()))
    assert {stage.ask(call("", multiplexed_model_id="m")) for _ in range(5)} == {"r3"}
    router: Any = stage.routing._router
    async with asyncio.timeout(20):
        while len(router.received) < 14:  # noqa: ASYNC110  # its thread sets no event
            await asyncio.sleep(0.001)
    assert router.received[2:4] == [("routed", "r1", "id", "x"), ("completed", "r1", "id")]
    assert router.app_name == "a"
    assert stage.routing.errors.fallbacks == {}
    stage.routing.close()


async def test_replicas_without_a_model_are_ranked_by_the_number_of_their_models(answers: Any) -> None:
    ranks = list[list[list[str]]]()

    def answer(replicas: list[RunningReplica], request: PendingRequest) -> Any:
        ranked = MultiplexMixin.rank_replicas_via_multiplex(None, replicas, "m")  # type: ignore[arg-type]
        ranks.append([[each.replica_id.unique_id for each in rank] for rank in ranked])
        return ranked

    answers(answer)
    stage = await custom()
    stage.ask()  # the router knows the replicas
    models = {"r0": {"a", "b"}, "r1": {"m", "a"}, "r2": {"a"}, "r3": {"b"}}
    stage.routing.show_models(lambda tag: frozenset(models[tag]))
    stage.ask(call("", multiplexed_model_id="m"))
    assert ranks[-1] == [["r1"], ["r2", "r3"], ["r0"]]
    stage.routing.close()


async def test_a_replica_that_has_stopped_meanwhile_is_no_choice(answers: Any) -> None:
    kept: list[RunningReplica] = []

    def answer(replicas: list[RunningReplica], request: PendingRequest) -> Any:
        kept.extend(replicas if not kept else ())
        return [kept[:1], replicas]

    answers(answer)
    stage = await custom()
    assert stage.ask() == "r0"
    stage.have("r1", "r2")
    assert stage.ask() in ("r1", "r2")
    assert stage.routing.errors.fallbacks == {}
    stage.routing.close()


def test_a_full_replica_of_other_processes_gets_a_request_only_if_no_other_has_room() -> None:
    async def scenario() -> None:
        stage = Stage("ConsistentHash", 2, concurrency=1)
        home = stage.ask(call("s"))
        other = "r1" if home == "r0" else "r0"
        now = asyncio.get_running_loop().time()
        stage.pool.report(stage.pool.entries()[str(home)], Load(1), now)
        assert stage.take(call("s")) == other
        assert stage.take(call("s")) == home
        assert stage.pool.queued == 1

    asyncio.run(scenario())


def test_the_address_of_a_worker_names_its_host() -> None:
    pool = ReplicaPool(lambda _: False)
    pool.update({"r": ("tcp://[::1]:80", 1)}, 1, str)
    assert pool.entries()["r"].address == ActorAddress("r", "tcp://[::1]:80", 1)
