"""Replicas behave the same wherever their user code runs; some tests are for child processes only.

A child takes a third of a second to start, so a module's tests share one per definition.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import sysconfig
import textwrap
import time
import venv
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import dask
import isolated_code as code
import numpy as np
import psutil
import pytest
from dask_processes import alive
from replica_harness import PLACES, Reply, call, http, make, until
from replica_starts import reconfiguration

from daskserve._version import __version__
from daskserve.cluster.protocols.base import HostedActor
from daskserve.common.types import SLOT_TAKEN, Envelope, EnvelopeKind, Load, Message, QueueTimeout
from daskserve.context import current_replica
from daskserve.data.replica.process.metrics import ReportedMetrics
from daskserve.data.replica.process.replica import ChildReplica
from daskserve.errors import (
    ActorLostError,
    BadRequestError,
    InstanceError,
    ReplicaBusyError,
    ReplicaStartError,
    RequestTimeoutError,
    UserCodeError,
    VersionMismatchError,
)
from daskserve.loops.deadlines import until as hold_until
from daskserve.loops.termination import SAME_S
from daskserve.payload import pickling
from daskserve.payload.packed_errors import PackedError
from daskserve.telemetry.histogram import HistogramCounts

DEADLINE_S = 20.0
#: The deadline on a replica after a test has missed one, so that the other tests of a stuck replica fail
#: soon.
STUCK_DEADLINE_S = 2.0
HERE, SUPPORT = Path(__file__).parent, Path(code.__file__).parent


async def bounded(work: Coroutine[Any, Any, Any], deadline_s: float = DEADLINE_S) -> Any:
    async with asyncio.timeout(deadline_s):
        return await work


def run(work: Coroutine[Any, Any, Any]) -> None:
    """Run a test on its own event loop, with a deadline."""
    asyncio.run(bounded(work))


class Bench:
    """A running replica on an event loop that outlives single tests."""

    def __init__(self, place: str, definition: Any, folder: Path, *args: Any, **options: Any) -> None:
        self.place = place
        self.folder = folder
        self.replica = make(definition, *args, place=place, **options)
        self._runner = asyncio.Runner()
        self._deadline_s = DEADLINE_S

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        try:
            return self._runner.run(bounded(coroutine, self._deadline_s))
        except TimeoutError:
            self._deadline_s = STUCK_DEADLINE_S
            raise

    def __enter__(self) -> Bench:
        try:
            self.facts = self.run(self.replica.start())
        except BaseException:
            self._runner.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._deadline_s = DEADLINE_S
        try:
            self.run(self.replica.stop(0))
            assert self.replica.load().ongoing == 0
        finally:
            self._runner.close()
        if self.place == "process":
            wait_until(lambda: processes_of(self.pid) == [], "processes are left")

    @property
    def pid(self) -> int:
        return int(self.facts["child_pid"])


def processes_of(leader: int) -> list[psutil.Process]:
    """Return the processes of a group that still run."""

    def group(process: psutil.Process) -> int:
        try:
            return os.getpgid(process.pid)
        except ProcessLookupError:
            return 0

    return alive(each for each in psutil.process_iter() if group(each) == leader)


def wait_until(condition: Callable[[], Any], what: str = "") -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


# ---- the same in a thread and in a process


@pytest.fixture(scope="module", params=PLACES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("model")
    with Bench(request.param, code.Model, folder, str(folder)) as bench:
        yield bench


@pytest.fixture(scope="module", params=PLACES)
def app(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Bench(request.param, code.APP, tmp_path_factory.mktemp("app")) as bench:
        yield bench


FACTS = ("is_blocking", "is_asgi_app", "accepts_batches")


def test_start_returns_facts_about_the_callable(model: Bench) -> None:
    assert [model.facts[name] for name in FACTS] == [True, False, False]
    assert {"__call__", "echo", "reconfigure"} <= set(model.facts["methods"])
    assert tuple(model.facts["rank_info"]) == (0, 0, 0, 1)


def test_arguments_and_results_cross_unchanged(model: Bench) -> None:
    values = ("text", b"bytes", {1: (2.5, None)}, [Path("/a")], code.Trouble("reason", 3).code)
    assert model.run(call(model.replica, "echo", *values, key=values)) == (values, {"key": values})


def test_large_arrays_cross_out_of_band(model: Bench) -> None:
    array = np.arange(2_000_000, dtype="f8")

    async def scenario() -> None:
        reply = Reply()
        head = {"method": "echo", "legacy": False, "request_id": ""}
        envelope = Envelope(EnvelopeKind.CALL, head, pickling.dump(((array,), {})))
        await model.replica.handle(envelope).respond(reply.receive, reply.send)
        answer = reply.sent[0]["payload"]
        assert len(answer.data) < 10_000
        ((echoed,), _) = answer.load()
        assert np.array_equal(echoed, array)

    model.run(scenario())


def test_code_knows_its_replica_and_request(model: Bench) -> None:
    expected = ["an-instance", "b", "b#AAAAAA", True, "request-1"]
    assert model.run(call(model.replica, "where")) == expected
    assert json.loads(model.run(http(model.replica, query=b"ask=where")).body) == expected
    assert current_replica.get() is None


@pytest.mark.parametrize("method", ["fail", "fail_async"])
def test_errors_of_user_code_reach_the_caller_unchanged(model: Bench, method: str) -> None:
    failed = model.run(model.replica.statistics())["failed_total"]
    with pytest.raises(code.Trouble) as caught:
        model.run(call(model.replica, method))
    assert model.run(model.replica.statistics())["failed_total"] == failed + 1
    assert (caught.value.args, caught.value.code) == (("what went wrong", 7), 7)
    if model.place == "process":
        assert "isolated_code.py" in str(caught.value.__cause__)


def test_requests_that_no_code_takes_are_rejected(model: Bench) -> None:
    for name in ("missing", "_chunks", "__init__"):
        with pytest.raises(BadRequestError, match=f"no public method '{name}'; it has: __call__, check"):
            model.run(call(model.replica, name))
    with pytest.raises(BadRequestError, match="takes no requests of kind"):
        model.replica.handle(Envelope(EnvelopeKind.CONTROL, {}))
    assert model.replica.load() == Load(0, 0)


def test_http_answers_with_status_headers_and_body(model: Bench) -> None:
    reply = model.run(http(model.replica))
    assert (reply.status, reply.headers["content-type"]) == (200, "text/plain; charset=utf-8")
    failed = model.run(model.replica.statistics())["failed_total"]
    missing = model.run(http(model.replica, query=b"ask=missing"))
    assert (missing.status, missing.body) == (404, b"no such thing")
    assert model.run(model.replica.statistics())["failed_total"] == failed
    failed = model.run(http(model.replica, query=b"ask=fail"))
    assert (failed.status, failed.body) == (500, b"Internal Server Error")


def test_uploads_and_streamed_responses_cross_in_parts(model: Bench) -> None:
    chunks = [bytes([number]) * 50_000 for number in range(40)]
    assert model.run(http(model.replica, *chunks, query=b"ask=length")).body == b"2000000"
    streamed = model.run(http(model.replica, query=b"ask=stream"))
    assert streamed.body.decode() == "".join(f"{number}," for number in range(40))
    assert len(streamed.sent) > 2  # parts that are ready together are joined


def test_a_caller_that_cannot_be_sent_to_ends_its_request(model: Bench) -> None:
    class Gone(OSError):
        pass

    async def scenario() -> None:
        async def send(message: Message) -> None:
            raise Gone

        reply = Reply({"type": "http.request", "body": b"", "more_body": False})
        reply.send = send  # type: ignore[method-assign]
        with pytest.raises(Gone):
            await http(model.replica, reply=reply, query=b"ask=stream")
        await until(lambda: model.replica.load().ongoing == 0)

    model.run(scenario())


def test_an_asgi_application_is_served_as_it_is(app: Bench) -> None:
    assert [app.facts[name] for name in FACTS] == [False, True, False]
    reply = app.run(http(app.replica, b"a ", b"b", path="/hello/you", method="POST"))
    assert (reply.status, reply.body, reply.headers["x-key"]) == (200, b"POST you a b", "v")
    assert app.run(http(app.replica, path="/other")).status == 404
    app.run(app.replica.probe())


def test_a_response_that_fails_half_way_is_cut_off(app: Bench) -> None:
    with pytest.raises((code.Trouble, PackedError), match="late"):
        app.run(http(app.replica, path="/late/"))
    assert app.replica.load().ongoing == 0


def test_web_sockets_reach_the_application(app: Bench) -> None:
    texts = [f"text {number}" for number in range(40)]
    frames = [{"type": "websocket.receive", "text": text} for text in [*texts, "end"]]
    messages = [{"type": "websocket.connect"}, *frames]
    reply = app.run(http(app.replica, kind="websocket", path="/echo", messages=messages))
    assert reply.sent[0]["type"] == "websocket.accept"
    assert [message["text"] for message in reply.sent[1:-1]] == [text.upper() for text in texts]
    assert reply.sent[-1]["code"] == 4000


def test_no_more_requests_run_than_there_are_slots(model: Bench) -> None:
    async def scenario() -> None:
        held = [asyncio.create_task(call(model.replica, "hold", f"slot-{n}")) for n in range(4)]
        await until(lambda: all((model.folder / f"slot-{n}-began").exists() for n in range(4)))
        assert model.replica.load() == Load(4, 0)
        with pytest.raises(ReplicaBusyError) as caught:
            await call(model.replica, "pid")
        assert caught.value.ongoing == 4
        for n in range(4):
            (model.folder / f"slot-{n}-go").touch()
        assert await asyncio.gather(*held) == [f"slot-{n}" for n in range(4)]
        assert model.replica.load() == Load(0, 0)
        metrics = await model.replica.statistics()
        assert (metrics["ongoing"], metrics["concurrency"], metrics["refused_total"]) == (0, 4, 1)
        brief = model.replica.metrics()
        assert (brief["ongoing"], sum(brief["latency_counts"])) == (0, brief["ended"])

    model.run(scenario())


async def call_patiently(replica: HostedActor, left_s: float = 60.0) -> Any:
    """Return the result of a call that waits for a slot, and the messages sent before it."""
    head = {"method": "pid", "legacy": False, "request_id": "request-1"}
    envelope = Envelope(EnvelopeKind.CALL, head, pickling.dump(((), {})), queue_timeout=QueueTimeout(left_s))
    reply = Reply()
    await replica.handle(envelope).respond(reply.receive, reply.send)
    first, answer = reply.sent
    return answer["payload"].load(), first


def test_requests_with_patience_wait_in_line_for_a_slot(model: Bench) -> None:
    async def scenario() -> None:
        replica = model.replica
        (pid, first) = await call_patiently(replica)
        assert first == {"type": SLOT_TAKEN, "ongoing": 1, "queued": 0}
        before = await replica.statistics()
        held = [asyncio.create_task(call(replica, "hold", f"line-{n}")) for n in range(4)]
        await until(lambda: all((model.folder / f"line-{n}-began").exists() for n in range(4)))
        waiting = [asyncio.create_task(call_patiently(replica)) for _ in range(3)]
        await until(lambda: replica.load() == Load(4, 3))
        assert (await replica.statistics())["queued"] == 3
        queued = [value for name, _, value in replica.samples() if name == "replica_queued_requests"]
        assert sum(queued) == 3
        with pytest.raises(ReplicaBusyError):
            await call_patiently(replica, 0.01)
        with pytest.raises(ReplicaBusyError):
            await call(replica, "pid")
        waiting[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting[0]
        assert replica.load() == Load(4, 2)
        (model.folder / "line-0-go").touch()
        outcomes = await asyncio.gather(*waiting[1:])
        assert [result for result, _ in outcomes] == [pid, pid]
        assert [received["ongoing"] for _, received in outcomes] == [4, 4]
        for n in range(1, 4):
            (model.folder / f"line-{n}-go").touch()
        await asyncio.gather(*held)
        assert replica.load() == Load(0, 0)
        after = await replica.statistics()
        grown = [after[name] - before[name] for name in ("handled_total", "refused_total", "cancelled_total")]
        assert grown == [6, 2, 0]

    model.run(scenario())


def test_more_slots_are_for_those_in_line(model: Bench) -> None:
    async def scenario() -> None:
        held = [asyncio.create_task(call(model.replica, "hold", f"more-{n}")) for n in range(4)]
        await until(lambda: all((model.folder / f"more-{n}-began").exists() for n in range(4)))
        waiting = asyncio.create_task(call_patiently(model.replica))
        await until(lambda: model.replica.load() == Load(4, 1))
        await model.replica.reconfigure(**reconfiguration(user_config=None, concurrency=5))
        await waiting
        await model.replica.reconfigure(**reconfiguration(user_config=None, concurrency=4))
        for n in range(4):
            (model.folder / f"more-{n}-go").touch()
        await asyncio.gather(*held)

    model.run(scenario())


@pytest.mark.parametrize("place", PLACES)
def test_requests_queued_when_the_replica_stops_have_not_begun(place: str, tmp_path: Path) -> None:
    with Bench(place, code.Model, tmp_path, str(tmp_path)) as bench:

        async def scenario() -> None:
            held = [asyncio.create_task(call(bench.replica, "hold", f"stop-{n}")) for n in range(4)]
            await until(lambda: all((tmp_path / f"stop-{n}-began").exists() for n in range(4)))
            waiting = asyncio.create_task(call_patiently(bench.replica))
            await until(lambda: bench.replica.load() == Load(4, 1))
            stopping = asyncio.create_task(bench.replica.stop(10))
            with pytest.raises(ActorLostError) as caught:
                await waiting
            assert not caught.value.begun
            assert not stopping.done()
            for n in range(4):
                (tmp_path / f"stop-{n}-go").touch()
            assert await asyncio.gather(*held) == [f"stop-{n}" for n in range(4)]
            await stopping

        bench.run(scenario())


def test_requests_queued_when_the_process_ends_have_not_begun(tmp_path: Path) -> None:
    with Bench("process", code.Model, tmp_path, str(tmp_path)) as bench:

        async def scenario() -> None:
            pid, _ = await call_patiently(bench.replica)
            held = [asyncio.create_task(call(bench.replica, "hold", f"end-{n}")) for n in range(4)]
            await until(lambda: all((tmp_path / f"end-{n}-began").exists() for n in range(4)))
            waiting = asyncio.create_task(call_patiently(bench.replica))
            await until(lambda: bench.replica.load() == Load(4, 1))
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(ActorLostError, match="is lost") as caught:
                await waiting
            assert not caught.value.begun
            assert {type(each) for each in await asyncio.gather(*held, return_exceptions=True)} == {
                ActorLostError
            }
            assert bench.replica.load() == Load(0, 0)

        bench.run(scenario())


@pytest.mark.parametrize("over_http", [False, True])
def test_a_cancelled_plain_request_keeps_its_slot_until_it_returns(model: Bench, over_http: bool) -> None:
    async def scenario() -> None:
        name = f"abandoned-{over_http}"
        before = await model.replica.statistics()
        held = http(model.replica, query=b"hold=" + name.encode()) if over_http else None
        request = asyncio.create_task(held or call(model.replica, "hold", name))
        await until((model.folder / f"{name}-began").exists)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        # While other requests begin and end, the slot stays taken.
        for _ in range(3):
            await call(model.replica, "pid")
        assert model.replica.load().ongoing == 1
        assert (await model.replica.statistics())["abandoned"] == 1
        (model.folder / f"{name}-go").touch()
        await until(lambda: model.replica.load().ongoing == 0)
        after = await model.replica.statistics()
        assert after["abandoned"] == 0
        assert after["cancelled_total"] == before["cancelled_total"] + 1

    model.run(scenario())


def test_a_request_that_is_late_ends_in_the_child_and_keeps_its_slot_until_its_code_has(
    model: Bench,
) -> None:
    """The child enforces the deadline itself; elsewhere the caller of the replica does."""

    async def late(method: str, name: str) -> None:
        deadline = asyncio.get_running_loop().time() + 0.2
        head = {"method": method, "legacy": False, "request_id": "1"}
        envelope = Envelope(EnvelopeKind.CALL, head, pickling.dump(((name,), {})), deadline)
        reply = Reply()
        work = model.replica.handle(envelope).respond(reply.receive, reply.send)
        with pytest.raises(RequestTimeoutError):
            await (work if model.place == "process" else hold_until(deadline, work, "late"))

    async def scenario() -> None:
        await late("hold_async", "late-async")
        await until((model.folder / "late-async-cancelled").exists)
        await late("hold", "late")
        for _ in range(3):
            await call(model.replica, "pid")
        assert model.replica.load().ongoing == 1
        (model.folder / "late-go").touch()
        await until(lambda: model.replica.load().ongoing == 0)

    model.run(scenario())


def test_a_cancelled_async_request_is_cancelled_and_frees_its_slot(model: Bench) -> None:
    async def scenario() -> None:
        request = asyncio.create_task(call(model.replica, "hold_async", "given-up"))
        await until((model.folder / "given-up-began").exists)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await until((model.folder / "given-up-cancelled").exists)
        await until(lambda: model.replica.load().ongoing == 0)

    model.run(scenario())


def test_requests_cancelled_at_any_moment_leave_no_slot_taken(model: Bench) -> None:
    async def scenario() -> None:
        rng = random.Random(1)
        for _ in range(30):
            works = [
                *(call(model.replica, name) for name in ("pid", "pid_async")),
                *(http(model.replica) for _ in range(2)),
            ]
            requests = [asyncio.create_task(each) for each in works]
            for _ in range(rng.randrange(12)):
                await asyncio.sleep(0 if rng.random() < 0.7 else 0.0005)
            for request in rng.sample(requests, 2):
                request.cancel()
            outcomes = await asyncio.gather(*requests, return_exceptions=True)
            assert not any(isinstance(each, Exception) for each in outcomes), outcomes
            await until(lambda: model.replica.load().ongoing == 0)
        assert (await model.replica.statistics())["abandoned"] == 0

    model.run(scenario())


def test_options_change_in_place(model: Bench) -> None:
    async def reconfigure(user_config: Any = None, **options: Any) -> None:
        pickled = None if user_config is None else pickling.dump_bytes(user_config)
        await model.replica.reconfigure(**reconfiguration(user_config=pickled, **options))

    async def scenario() -> None:
        await reconfigure("changed", concurrency=2)
        assert await call(model.replica, "__call__") == "changed"
        assert (await model.replica.statistics())["concurrency"] == 2
        with pytest.raises(ReplicaStartError, match="ValueError: bad config") as caught:
            await reconfigure("bad", concurrency=9)
        assert "isolated_code.py" in caught.value.user_traceback
        with pytest.raises(BadRequestError, match="max_batch_size is 5"):
            await reconfigure(max_batch_size=5)
        assert (await model.replica.statistics())["concurrency"] == 2
        held = asyncio.create_task(call(model.replica, "hold", "while-reconfigured"))
        await until(lambda: (model.folder / "while-reconfigured-began").exists())
        changing = asyncio.create_task(reconfigure("word"))
        await asyncio.sleep(0)
        refused = asyncio.create_task(call(model.replica, "__call__"))
        for _ in range(2):
            await asyncio.sleep(0)
        assert isinstance(refused.exception(), ReplicaBusyError), "refused here: the child is not asked"
        (model.folder / "while-reconfigured-go").touch()
        await asyncio.gather(held, changing)

    model.run(scenario())


def test_the_users_health_check_is_part_of_the_probe(model: Bench) -> None:
    async def scenario() -> None:
        await model.replica.probe()
        await model.replica.reconfigure(
            **reconfiguration(user_config=pickling.dump_bytes("ill"), concurrency=4)
        )
        with pytest.raises(UserCodeError, match="raised RuntimeError: feverish"):
            await model.replica.probe()
        await model.replica.reconfigure(
            **reconfiguration(user_config=pickling.dump_bytes("word"), concurrency=4)
        )
        assert model.replica.health()["is_healthy"]

    model.run(scenario())


def test_requests_are_batched_in_a_process(tmp_path: Path) -> None:
    with Bench("process", code.double, tmp_path, max_batch_size=3, batch_wait_timeout=60.0) as bench:

        async def scenario() -> None:
            replica = bench.replica
            one, two, three = await asyncio.gather(
                call(replica, "__call__", n=1), http(replica, query=b"n=2"), call(replica, "__call__", n=3)
            )
            assert (one, two.body, three) == ([2, 3], b"[4,3]", [6, 3])

        bench.run(scenario())


@pytest.mark.parametrize("place", PLACES)
def test_stop_waits_for_running_requests_rejects_new_ones_and_destructs(place: str, tmp_path: Path) -> None:
    with Bench(place, code.Model, tmp_path, str(tmp_path)) as bench:

        async def scenario() -> None:
            replica = bench.replica
            request = asyncio.create_task(call(replica, "hold_async", "last"))
            await until((tmp_path / "last-began").exists)
            stopping = asyncio.create_task(replica.stop(DEADLINE_S))
            await asyncio.sleep(0)
            for refused in (call(replica, "pid"), replica.probe(), replica.reconfigure(**reconfiguration(1))):
                with pytest.raises(ActorLostError) as caught:
                    await refused
                assert not caught.value.begun
            assert not (tmp_path / "destructed").exists()
            assert not stopping.done()
            (tmp_path / "last-go").touch()
            assert await request == "last"
            await stopping
            assert (tmp_path / "destructed").exists()

        bench.run(scenario())


@pytest.mark.parametrize("place", PLACES)
def test_requests_that_exceed_the_grace_period_are_cancelled(place: str, tmp_path: Path) -> None:
    with Bench(place, code.Model, tmp_path, str(tmp_path)) as bench:

        async def scenario() -> None:
            request = asyncio.create_task(call(bench.replica, "hold_async", "late"))
            await until((tmp_path / "late-began").exists)
            patient = asyncio.create_task(bench.replica.stop(DEADLINE_S))
            await asyncio.sleep(0)
            await bench.replica.stop(0.01)
            (outcome,) = await asyncio.gather(request, return_exceptions=True)
            assert isinstance(outcome, ActorLostError)
            assert outcome.begun
            assert outcome.is_planned
            assert "was stopped" in str(outcome)
            await patient
            assert (tmp_path / "late-cancelled").exists()
            if place == "process":  # in a thread the outcome's traceback holds the user's object
                assert (tmp_path / "destructed").exists()

        bench.run(scenario())


def test_a_destructor_in_a_child_has_the_rest_of_the_grace_period(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("daskserve.data.replica.replica.CLOSE_GRACE_S", 0.01)  # in this process
    with Bench("process", code.SlowEnd, tmp_path, str(tmp_path)) as bench:

        async def scenario() -> None:
            stopping = asyncio.create_task(bench.replica.stop(DEADLINE_S))
            await until((tmp_path / "ending").exists)
            await asyncio.sleep(1.2)  # the child's own minimum is 1 s
            assert not stopping.done()
            (tmp_path / "go").touch()
            await stopping
            assert (tmp_path / "destructed").exists()

        bench.run(scenario())


def test_a_failed_start_in_a_process_reports_where_and_why() -> None:
    async def main() -> None:
        replica = make(code.DiesInConstructor, "raise", place="process")
        with pytest.raises(
            ReplicaStartError, match="in its constructor: ZeroDivisionError: in the"
        ) as caught:
            await replica.start()
        assert "isolated_code.py" in caught.value.user_traceback
        with pytest.raises(ActorLostError):
            await call(replica, "pid")
        await replica.stop(0)

    run(main())


# ---- only in a process


def breaker(folder: Path, **options: Any) -> Bench:
    return Bench("process", code.Breaker, folder, str(folder), **options)


@pytest.mark.parametrize("model", ["process"], indirect=True)
def test_it_is_another_process(model: Bench) -> None:
    assert model.run(call(model.replica, "pid")) == model.pid != os.getpid()
    assert psutil.Process(model.pid).ppid() == os.getpid()
    assert psutil.Process(model.pid).cmdline()[-1] == "b#AAAAAA"


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has the numbers in /proc")
@pytest.mark.parametrize(
    ("definition", "options"),
    [
        (code.MainAsync, {}),
        (code.MainAsync, {"is_async": True}),
        (code.MainOfWorkersLoop, {"event_loop": "worker"}),
    ],
)
def test_user_code_is_loaded_and_constructed_in_the_main_thread_of_its_process(
    definition: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    with Bench("process", definition, tmp_path, str(tmp_path), **options) as bench:
        assert bench.run(call(bench.replica, "facts")) == [True, True]


@pytest.mark.parametrize(
    ("number", "outcome"), [(signal.SIGTERM, "exited with status 3"), (signal.SIGINT, "was killed by SIGINT")]
)
def test_a_signal_ends_a_process_by_the_handler_of_user_code_if_it_has_one(
    number: int, outcome: str, tmp_path: Path
) -> None:
    async def main() -> None:
        replica = make(code.MainPlain, str(tmp_path), place="process")
        os.kill((await replica.start())["child_pid"], number)
        with suppress(ActorLostError):
            while True:
                await replica.probe()
        with pytest.raises(ActorLostError, match=outcome):
            await replica.probe()
        await replica.stop(0)
        assert (tmp_path / "ended").exists() == (number == signal.SIGTERM)

    run(main())


def test_a_process_that_gets_sigterm_serves_until_another_has_taken_its_place(tmp_path: Path) -> None:
    with breaker(tmp_path) as bench:

        async def scenario() -> None:
            assert "is_leaving" not in bench.replica.health()
            os.kill(bench.pid, signal.SIGTERM)
            await until(lambda: bench.replica.health().get("is_leaving"))
            assert bench.replica.health()["is_healthy"]
            assert await call(bench.replica, "pid") == bench.pid
            await bench.replica.stop(DEADLINE_S)
            assert processes_of(bench.pid) == []

        bench.run(scenario())


@pytest.mark.parametrize("how", ["again", "late", "left to Python"])
def test_a_process_that_gets_sigterm_ends_when_its_time_is_over_or_at_a_second_one(
    how: str, tmp_path: Path
) -> None:
    grace_s = {"again": 60.0, "late": 0.2, "left to Python": 0.0}[how]
    with dask.config.set({"daskserve.process.termination-grace-s": grace_s}), breaker(tmp_path) as bench:

        async def scenario() -> None:
            os.kill(bench.pid, signal.SIGTERM)
            if how == "again":
                await until(lambda: bench.replica.health().get("is_leaving"))
                await asyncio.sleep(SAME_S)
                os.kill(bench.pid, signal.SIGTERM)
            await until(lambda: not bench.replica.health()["is_healthy"])
            assert "was killed by SIGTERM" in bench.replica.health()["detail"]

        bench.run(scenario())


def test_a_process_answers_and_ends_while_code_blocks_its_main_thread(tmp_path: Path) -> None:
    async def main() -> None:
        replica = make(code.MainPlain, str(tmp_path), place="process")
        facts = await replica.start()
        blocked = asyncio.create_task(call(replica, "block"))
        await until((tmp_path / "blocked").exists)
        assert await call(replica, "facts") == [True, True]  # in another thread
        began = time.monotonic()
        await replica.stop(0)
        assert time.monotonic() - began < DEADLINE_S / 2
        with pytest.raises(ActorLostError):
            await blocked
        assert processes_of(facts["child_pid"]) == []

    run(main())


def test_a_process_of_user_code_is_killed_first_if_the_machine_is_out_of_memory(tmp_path: Path) -> None:
    with breaker(tmp_path) as bench:
        own, child = (int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in ("self", bench.pid))
        assert child > own


@pytest.mark.parametrize("model", ["process"], indirect=True)
def test_it_says_why_handles_do_not_work_in_a_cluster_within_one_process(model: Bench) -> None:
    with pytest.raises(InstanceError, match="runs within a single process; use isolation='thread'"):
        model.run(call(model.replica, "connect"))


@pytest.mark.parametrize("place", PLACES)
def test_the_requests_of_an_unhealthy_replica_that_is_stopped_may_be_the_reason(
    place: str, tmp_path: Path
) -> None:
    often = {"health_check_period_s": 0.01, "health_check_threshold": 1}
    with Bench(place, code.Model, tmp_path, str(tmp_path), **often) as bench:

        async def scenario() -> None:
            request = asyncio.create_task(call(bench.replica, "hold_async", "ill"))
            await until((tmp_path / "ill-began").exists)
            feverish = reconfiguration(user_config=pickling.dump_bytes("ill"), concurrency=4, **often)
            await bench.replica.reconfigure(**feverish)
            await until(lambda: not bench.replica.health()["is_healthy"])
            await bench.replica.stop(0)
            (outcome,) = await asyncio.gather(request, return_exceptions=True)
            assert isinstance(outcome, ActorLostError)
            assert outcome.begun
            assert not outcome.is_planned

        bench.run(scenario())


@pytest.mark.parametrize(
    ("method", "args", "outcome"),
    [("exit", (3,), "exited with status 3"), ("crash", (), "was killed by SIGSEGV")],
)
def test_a_process_that_ends_is_a_lost_replica(
    method: str, args: Any, outcome: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with breaker(tmp_path) as bench:

        async def scenario() -> None:
            replica = bench.replica
            grandchild = psutil.Process(await call(replica, "spawn"))
            other = asyncio.create_task(call(replica, "hold_async", "other"))
            await until((tmp_path / "other-began").exists)
            outcomes = await asyncio.gather(call(replica, method, *args), other, return_exceptions=True)
            for error in outcomes:
                assert isinstance(error, ActorLostError), error
                assert error.begun
                assert not error.is_planned
                assert str(error) == f"Replica 'b#AAAAAA' is lost: its process {outcome}."
            assert replica.load() == Load(0, 0)
            for verb in (call(replica, "pid"), replica.probe(), replica.statistics()):
                with pytest.raises(ActorLostError, match=outcome) as caught:
                    await verb
                assert not caught.value.begun
            assert not replica.health()["is_healthy"]
            assert outcome in replica.health()["detail"]
            await until(lambda: alive([grandchild]) == [])  # killed already, but the kernel takes its time

        bench.run(scenario())
    assert outcome in caplog.text


def test_an_answer_given_before_the_end_still_arrives(tmp_path: Path) -> None:
    with breaker(tmp_path) as bench:

        async def scenario() -> None:
            request = asyncio.create_task(call(bench.replica, "answer_and_exit"))
            await asyncio.sleep(0)
            await asyncio.sleep(0.001)
            # Meanwhile the child answers and ends, so the worker learns of both at the same time.
            time.sleep(0.3)
            assert await request == "last words" * 1_000

        bench.run(scenario())


@pytest.mark.parametrize(
    ("how", "outcome"), [("exit", "exited with status 7"), ("crash", "killed by SIGSEGV")]
)
def test_a_process_that_ends_in_the_constructor_is_a_failed_start(how: str, outcome: str) -> None:
    async def main() -> None:
        replica = make(code.DiesInConstructor, how, place="process")
        with pytest.raises(ReplicaStartError, match=f"did not survive its start: its process .*{outcome}"):
            await replica.start()
        await replica.stop(0)

    run(main())


def test_a_start_that_is_given_up_leaves_no_process(tmp_path: Path) -> None:
    async def main() -> None:
        replica = make(code.NeverMade, str(tmp_path), place="process")
        starting = asyncio.create_task(replica.start())
        await until((tmp_path / "constructor-began").exists)
        child = replica._code._child.pid
        starting.cancel()
        await replica.stop(0)
        assert child not in psutil.pids()
        await asyncio.wait([starting])
        assert starting.cancelled()

    run(main())


@pytest.mark.parametrize("is_reversed", [False, True], ids=["in-order", "reversed"])
def test_a_start_ends_with_its_event_loop(tmp_path: Path, is_reversed: bool) -> None:
    async def main() -> None:
        replica = make(code.NeverMade, str(tmp_path), place="process")
        starting = asyncio.create_task(replica.start())
        await until((tmp_path / "constructor-began").exists)
        child = replica._code._child
        # Cancel all tasks as `asyncio.run` does at its end, but with a deadline, and in either order.
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in sorted(tasks, key=asyncio.Task.get_name, reverse=is_reversed):
            task.cancel()
        await asyncio.wait([starting], timeout=5)
        assert starting.cancelled()
        await until(lambda: child._process.returncode == -signal.SIGKILL)

    run(main())


def test_a_stuck_process_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    async def scenario(method: str, event_loop: str) -> None:
        folder = tmp_path / method
        folder.mkdir()
        replica = make(code.Breaker, str(folder), event_loop=event_loop, place="process")
        await replica.start()
        grandchild = psutil.Process(await call(replica, "spawn"))
        request = asyncio.create_task(call(replica, method, "stuck"))
        await until((folder / "stuck-began").exists)
        if method != "sleep":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(replica.probe(), 0.05)
        began = time.monotonic()
        await replica.stop(0)
        assert time.monotonic() - began < 2
        (outcome,) = await asyncio.gather(request, return_exceptions=True)
        assert isinstance(outcome, ActorLostError)
        assert outcome.begun
        await until(lambda: alive([grandchild]) == [])
        assert replica._code._child.pid not in psutil.pids()

    async def main() -> None:
        stuck = [("sleep", "own"), ("block", "worker"), ("hold_the_lock", "own")]
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*(scenario(*each) for each in stuck))

    run(main())


WORKER = """
import asyncio, sys, test_isolation as t
async def main():
    calls = []
    for method in ("sleep", "hold_the_lock"):
        replica = t.make(t.code.Breaker, sys.argv[1], place="process")
        print((await replica.start())["child_pid"], await t.call(replica, "spawn"), flush=True)
        calls.append(asyncio.create_task(t.call(replica, method, method)))
    await asyncio.gather(*calls)
t.run(main())
"""


def test_processes_end_with_their_worker_whatever_they_do(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WORKER, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(SUPPORT)])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as worker:
        assert worker.stdout is not None
        pids = [*worker.stdout.readline().split(), *worker.stdout.readline().split()]
        orphans = [psutil.Process(int(pid)) for pid in pids]
        try:
            assert len(orphans) == 4
            wait_until((tmp_path / "hold_the_lock-began").exists)
        finally:
            worker.kill()
    try:
        wait_until(lambda: alive(orphans) == [], "they live on")
    finally:
        for each in alive(orphans):
            each.kill()


def test_a_cancelled_request_has_ended_when_its_code_has(tmp_path: Path) -> None:
    async def main() -> None:
        replica = ChildReplica(make(code.Model, str(tmp_path))._context)
        await replica.start()
        head = {"method": "hold", "legacy": False, "request_id": ""}
        envelope = Envelope(EnvelopeKind.CALL, head, pickling.dump((("one",), {})))
        request = asyncio.create_task(replica.respond(1, envelope, Reply().receive, Reply().send))
        await until((tmp_path / "one-began").exists)
        ended = asyncio.create_task(replica.ended(1))
        await replica.ended(2)  # one that never came to begin
        assert not ended.done()
        request.cancel()
        await asyncio.wait([request])
        await asyncio.sleep(0)
        assert not ended.done()
        (tmp_path / "one-go").touch()
        await ended
        assert replica.load().ongoing == 0
        await replica.stop(0)

    run(main())


# ---- Python environments


def make_environment(folder: Path, *paths: Path | str) -> Path:
    """Create a virtualenv quickly: without pip, and with the packages of other folders."""
    venv.EnvBuilder(symlinks=True).create(folder)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    lines = (f"import site; site.addsitedir({str(path)!r})\n" for path in paths)
    (packages / "more.pth").write_text("".join(lines))
    return folder


def test_a_virtualenv_is_used_with_its_own_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/of/the/worker")
    ours = sysconfig.get_path("purelib")
    folder = make_environment(tmp_path / "env", ours, SUPPORT)
    with Bench("process", code.interpreter, tmp_path, environment=str(folder)) as bench:
        assert bench.run(call(bench.replica, "__call__")) == [str(folder), str(folder), ""]


def start_error(environment: Path | str) -> Exception:
    """Return the error of a replica that fails to start in an environment; no process is left."""

    async def main() -> None:
        before = set(psutil.Process().children())
        with pytest.raises((BadRequestError, InstanceError)) as caught:
            await make(code.quick, environment=str(environment), place="process").start()
        assert set(psutil.Process().children()) <= before
        errors.append(caught.value)

    errors: list[Exception] = []
    run(main())
    return errors[0]


def test_an_environment_that_is_not_there_is_named(tmp_path: Path) -> None:
    error = start_error(tmp_path / "none")
    assert isinstance(error, ValueError)
    assert f"'{tmp_path}/none' does not exist" in str(error)
    assert f"no interpreter {tmp_path}/none/bin/python" in str(error)
    assert isinstance(start_error("no-such-environment"), ValueError)


def test_an_interpreter_without_daskserve_is_named_with_the_remedy(tmp_path: Path) -> None:
    error = start_error(make_environment(tmp_path / "env"))
    assert isinstance(error, VersionMismatchError)
    python = tmp_path / "env" / "bin" / "python"
    assert f"interpreter {python} (Python 3." in str(error)
    assert "has no daskserve (ModuleNotFoundError" in str(error)
    assert str(error).endswith(f"{python} -m pip install daskserve=={__version__}")


def test_an_interpreter_with_another_daskserve_is_named(tmp_path: Path) -> None:
    package = tmp_path / "old" / "daskserve"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "_version.py").write_text('__version__ = "0.0.1"\n')
    error = start_error(make_environment(tmp_path / "env", package.parent))
    assert isinstance(error, VersionMismatchError)
    assert f"has daskserve 0.0.1 but its worker has {__version__}" in str(error)


def script(folder: Path, text: str) -> Path:
    """Create an environment whose interpreter is a shell script."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{text}\n")
    python.chmod(0o755)
    return folder


def test_another_python_is_named(tmp_path: Path) -> None:
    # The script's arguments are those of `python -c CODE ...`.
    pretend = textwrap.dedent("""\
        import sys
        sys.version_info = (3, 8, 1)
        sys.argv = sys.argv[2:]
        exec(sys.argv[0])
        """)
    error = start_error(script(tmp_path / "env", f"exec {sys.executable} -c '{pretend}' \"$@\""))
    assert isinstance(error, VersionMismatchError)
    assert "(Python 3.8) cannot run a replica of this worker" in str(error)


def test_an_interpreter_that_does_not_run_is_named(tmp_path: Path) -> None:
    error = start_error(script(tmp_path / "ends", "exit 3"))
    assert f"The interpreter {tmp_path}/ends/bin/python did not start: it exited with status 3" in str(error)
    folder = script(tmp_path / "broken", "")
    (folder / "bin" / "python").write_bytes(b"\x7fELF nonsense")
    assert "cannot be run" in str(start_error(folder))


# ---- metrics


def series(replica: Any) -> dict[tuple[str, ...], float]:
    """Return the samples of the replica by name, and by labels other than instance and backend."""
    return {
        (name, *labels[2:]): value.count if isinstance(value, HistogramCounts) else value
        for name, labels, value in replica.samples()
        if labels[:2] == ("an-instance", "b")
    }


@pytest.mark.parametrize("place", PLACES)
def test_metrics_are_the_same_wherever_the_code_runs(place: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        replica = bench.replica
        with pytest.raises(code.Trouble):
            await call(replica, "fail")
        for size in (0.5, 5, 50):
            await call(replica, "count", "a", size)
        await until(lambda: series(replica)[("deployment_requests",)] == 4)
        found = series(replica)
        me = "b#AAAAAA"
        assert (found[("deployment_errors",)], found[("deployment_request_duration_seconds",)]) == (1, 4)
        starts = ("deployment_replica_starts", "deployment_replica_start_failures")
        assert [found[(name,)] for name in starts] == [1, 0]
        assert (found[("replica_requests", me)], found[("replica_healthy", me)]) == (4, 1)
        slots = ("replica_ongoing_requests", "replica_max_ongoing_requests")
        assert [found[(name, me)] for name in slots] == [0, 4]
        assert (found[("replica_errors", me)], found[("replica_request_duration_seconds", me)]) == (1, 4)
        assert found[("replica_start_time_seconds", me)] > 1e9
        assert 0 < found[("replica_startup_duration_seconds", me)] < DEADLINE_S
        await until(lambda: len(replica.user_samples()) == 2)
        calls, sizes = replica.user_samples()
        own = (("serve_instance", "an-instance"), ("deployment", "b"), ("replica", me))
        assert (calls.labels, calls.value) == ((*own, ("kind", "a")), 3)
        assert isinstance(sizes.value, HistogramCounts)
        assert (sizes.value.counts, sizes.value.sum) == ([1, 1, 1], 55.5)
        await until(lambda: "custom" in replica.metrics())
        assert replica.metrics()["custom"] == {"pid": await call(replica, "count", "a", 1)}
        metrics = await replica.statistics()
        assert (metrics["handled_total"], sum(metrics["latency_counts"])) == (5, 5)
        assert not {"samples", "custom"} & set(metrics)

    with Bench(place, code.Measuring, tmp_path) as bench:
        bench.run(scenario())
        bench.run(call(bench.replica, "count", "a", 1))
        bench.run(bench.replica.stop(1))
    assert series(bench.replica)[("deployment_requests",)] == 6


def test_a_replica_that_refuses_says_so_in_one_figure() -> None:
    replica = make(code.Model, "nowhere", place="process")
    replica._metrics.refused = 2  # type: ignore[union-attr]
    replica._code._reported = ReportedMetrics([["deployment_rejections", ["an-instance", "b"], 3]])  # type: ignore[union-attr]
    rejections = [value for name, _, value in replica.samples() if name == "deployment_rejections"]
    assert sum(rejections) == 5  # type: ignore[arg-type]
