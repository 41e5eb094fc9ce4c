"""Bodies of requests and responses in a sink: the written events, and the effects of a failing sink."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from dask_processes import poll_for
from tables import each_case
from tornado.websocket import websocket_connect

import daskserve as serve
from daskserve.common.types import Payload
from daskserve.errors import RequestTimeoutError
from daskserve.options.fields.secrets import masked
from daskserve.options.payload_logging import PayloadLoggingConfig
from daskserve.payload.pickling import dump
from daskserve.telemetry.collector import PROCESS
from daskserve.telemetry.payloads import writer as module
from daskserve.telemetry.payloads.events import Origin, Sample, events_of, line_of
from daskserve.telemetry.payloads.writer import PayloadWriter
from daskserve.testing import local_instance

DEADLINE_S = 20
ORIGIN = Origin("i", "shop", "Model", "abc")


def hide(event: dict[str, Any]) -> dict[str, Any] | None:
    if event.get("path") == "/hidden":
        return None
    if event.get("path") == "/wrong":
        raise ValueError(event["data"])
    if isinstance(event.get("data"), dict) and "card" in event["data"]:
        event["data"]["card"] = "***"
    return event


def lines_in(url: str) -> list[dict[str, Any]]:
    system, root = fsspec.core.url_to_fs(url)
    files = sorted(system.find(root)) if system.exists(root) else []
    return [json.loads(line) for each in files for line in system.cat(each).decode().splitlines()]


def sample(body: Any = b"", answer: Any = b"", **head: Any) -> Sample:
    found = Sample(1.5, 10, "http", {"method": "POST", "path": "/x", "headers": (), **head})
    found.received({"type": "http.request", "body": body})
    found.sent({"type": "http.response.start", "status": 200, "headers": [(b"Content-Type", b"text/a")]})
    found.sent({"type": "http.response.body", "body": answer})
    return found


def post(url: str, body: Any) -> bytes:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        return bytes(answer.read())


def metric(name: str) -> dict[str, float]:
    return {labels[-1]: value for each, labels, value in PROCESS.samples() if each == name}


@pytest.mark.parametrize("place", ["memory", "file"])
def test_payloads_of_a_replica_are_in_the_sink(place: str, tmp_path: Path) -> None:
    sink = f"memory://payloads{tmp_path}" if place == "memory" else str(tmp_path / "deep")

    async def double(request: Any) -> Any:
        return {"twice": 2 * (await request.json())["n"], "card": "1234"}

    class Model:
        def __call__(self, n: int, unit: object = None) -> int:
            return 2 * n

        def count(self, n: int) -> Iterator[int]:
            yield from range(n)

    async def echo(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "websocket":
            raise ValueError(scope["type"])
        await send({"type": "websocket.accept"})
        await receive()
        said = await receive()
        await send({"type": "websocket.send", "text": said["text"].upper()})
        await send({"type": "websocket.close"})

    logging = {"sink": sink, "flush_period_s": 0.1}
    with local_instance(http_options={"port": 0}) as client:
        (url,) = client.http_urls()
        client.deploy("echo", echo, config={"payload_logging": logging}, route_prefix="/echo")
        app = serve.deployment(double).options(payload_logging={**logging, "redact": hide})
        client.run(app.bind(), name="http", route_prefix="/")
        other = serve.deployment(Model).options(payload_logging=PayloadLoggingConfig(**logging))
        handle = client.run(other.bind(), name="calls", route_prefix=None)
        assert json.loads(post(f"{url}/a?token=secret", {"n": 1, "card": "5678"}))["card"] == "1234"
        post(f"{url}/hidden", {"n": 1})
        post(f"{url}/wrong", {"n": 1})
        assert handle.remote(2, unit=1j).result() == 4
        assert list(handle.options(stream=True).count.remote(3)) == [0, 1, 2]

        async def talk() -> Any:
            socket = await websocket_connect(f"ws{url[4:]}/echo")
            await socket.write_message("hello")
            said = await socket.read_message()
            socket.close()
            assert await socket.read_message() is None  # the connection is closed before its loop is
            return said

        assert asyncio.run(talk()) == "HELLO"
    found = {
        (each["deployment"], each.get("path"), each["type"].split(".")[1]): each for each in lines_in(sink)
    }
    http = [found["double", "/a", kind] for kind in ("request", "response")]
    assert http[0]["data"] == {"n": 1, "card": "***"}
    assert (http[1]["data"], http[1]["status"]) == ({"twice": 2, "card": "***"}, 200)
    assert http[0]["requestid"] == http[1]["requestid"] != ""
    assert "secret" not in str(http)
    assert ("double", "/hidden", "request") not in found
    assert not any(path == "/wrong" for _, path, _ in found)
    socket = [found["echo", "/echo", kind] for kind in ("request", "response")]
    assert [each["data"] for each in socket] == ["hello", "HELLO"]
    calls = [each for each in lines_in(sink) if each["application"] == "calls"]
    assert [each["data"] for each in calls if each["method"] == "__call__"] == [
        {"args": [2], "kwargs": {"unit": "1j"}},
        4,
    ]
    assert [each["data"] for each in calls if each["method"] == "count"][1] == [0, 1, 2]


def test_a_change_acts_on_running_replicas_and_chance_decides(tmp_path: Path) -> None:
    def answer(number: int) -> tuple[int, str]:
        return number, serve.get_replica_context().replica_tag

    with local_instance(http_options={"port": 0}) as client:
        app = serve.deployment(answer).options(name="d")

        def run(**options: Any) -> Any:
            logging = {"sink": f"file://{tmp_path}", "mode": "response", **options}
            return client.run(app.options(payload_logging=logging).bind(), route_prefix=None)

        handle = run(sampling_ratio=0.0)
        _, replica = handle.remote(0).result()
        run(sampling_ratio=1.0)
        assert handle.remote(1).result() == (1, replica)
        run(sampling_ratio=0.5)
        for _ in range(100):
            handle.remote(2).result()
    data = [each["data"] for each in lines_in(str(tmp_path))]
    assert data[0] == [1, replica]
    assert 20 < len(data) < 80


@each_case(
    ("body", "data"),
    [
        ("", {}),
        ("short", {"data": "short"}),
        ("0123456789a", {"data": "0123456789", "truncated": True}),
        ("012345678é", {"data": "012345678", "truncated": True}),
        (b"\xff\x00", {"data_base64": "/wA="}),
    ],
)
def test_a_body_is_text_if_it_can_be(body: Any, data: dict[str, Any]) -> None:
    body = body.encode() if isinstance(body, str) else body
    _, answer = events_of(sample(b"", body), ORIGIN, "all")
    names = ("data", "data_base64", "truncated")
    assert {name: answer[name] for name in names if name in answer} == data
    assert answer["size"] == len(body)
    assert answer["source"] == "/i/shop/Model/abc"
    assert answer["datacontenttype"] == "text/a"


@each_case(
    "messages, status, body",
    [
        ([("close", {"code": 1000})], 403, ""),
        ([("accept", {}), ("close", {"code": 1000})], 101, ""),
        ([("http.response.start", {"status": 401}), ("http.response.body", {"body": b"no"})], 401, "no"),
    ],
)
def test_the_status_of_a_websocket_is_that_of_its_handshake(messages: Any, status: int, body: str) -> None:
    found = Sample(1.5, 10, "websocket", {"path": "/x", "headers": ()})
    for kind, values in messages:
        found.sent({"type": f"websocket.{kind}", **values})
    (event,) = events_of(found, ORIGIN, "response")
    assert (event["status"], event.get("data", "")) == (status, body)


def test_a_request_whose_time_is_over_has_another_status_than_one_whose_caller_leaves(tmp_path: Path) -> None:
    sink = str(tmp_path / "sink")

    async def wait(name: str) -> None:
        (tmp_path / name).touch()
        await asyncio.Event().wait()

    with local_instance() as client:
        app = serve.deployment(wait).options(payload_logging={"sink": sink, "mode": "response"})
        handle = client.run(app.bind(), route_prefix=None)
        with pytest.raises(RequestTimeoutError):
            handle.options(timeout_s=0.05).remote("late").result()
        left = handle.remote("left")
        poll_for((tmp_path / "left").exists)
        left.cancel()
    assert [each["status"] for each in lines_in(sink)] == [408, 499]


def test_a_value_that_is_too_large_or_odd_is_no_failure() -> None:
    found = Sample(0.0, 100, "call", {"request_id": "r"})
    found.request.add_payload(dump(((b"x" * 200,), {})))
    found.sent({"type": "call.result", "payload": dump({(1, 2): float("nan"), "f": 1j})})
    request, response = (json.loads(line_of(each)) for each in events_of(found, ORIGIN, "all"))
    assert "data" not in request
    assert request["truncated"]
    assert response["data"] == {"(1, 2)": "nan", "f": "1j"}
    assert isinstance(found.response.payloads[0], Payload)


class Sink:
    """A sink that fails or hangs until the test lets it work."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.tries: list[str] = []
        self.error: Exception | None = None
        self.hold = threading.Event()
        self.hold.set()
        self.called = threading.Semaphore(0)

    def write(self, path: str, data: bytes) -> None:
        self.tries.append(path)
        self.called.release()
        self.hold.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error
        self.files[path] = data


@pytest.fixture
def sink(monkeypatch: pytest.MonkeyPatch) -> Sink:
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    monkeypatch.setattr(module, "MAX_WAITING", 5)
    return Sink()


def writer_to(sink: Sink, redact: Any = None, flush_period_s: float = 0.0) -> PayloadWriter:
    options: dict[str, Any] = {"mode": "response", "flush_period_s": flush_period_s, "masked": masked}
    return PayloadWriter(ORIGIN, lambda: sink.write, lambda: redact, **options)


def test_a_file_is_written_before_its_time_once_it_has_the_size_of_a_file(
    sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, answer = events_of(sample(b"", b"1"), ORIGIN, "all")
    monkeypatch.setattr(module, "FILE_BYTES", 2 * len(line_of(answer)) + 1)
    writer = writer_to(sink, flush_period_s=3600)
    for _ in range(4):
        writer.offer(sample(b"", b"1"))
    assert sink.called.acquire(timeout=DEADLINE_S), "the first file waits for the fourth sample"
    writer.close(DEADLINE_S)
    assert [each.count(b"\n") for each in sink.files.values()] == [3, 1]
    assert writer.written == 4


def test_samples_that_wait_have_a_limit_of_bytes(sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sample().nbytes
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 3 * size)
    sink.hold.clear()
    writer = writer_to(sink)
    writer.offer(sample())
    assert sink.called.acquire(timeout=DEADLINE_S), "the thread has taken the first"
    for _ in range(5):
        writer.offer(sample())
    assert writer.dropped == {"queue": 2}
    sink.hold.set()
    writer.close(DEADLINE_S)
    assert writer.written == 4


def test_a_sink_that_was_full_gets_what_waited_in_the_same_file(sink: Sink, caplog: Any) -> None:
    sink.error = OSError(28, "No space left on s3://key:secret@bucket")
    writer = writer_to(sink)
    writer.offer(sample(b"", b"1"))
    for _ in range(3):
        assert sink.called.acquire(timeout=DEADLINE_S)
    assert len(set(sink.tries)) == 1
    sink.error = None
    writer.close(DEADLINE_S)
    assert [json.loads(each)["data"] for each in sink.files.values()] == ["1"]
    assert (writer.written, dict(writer.dropped)) == (1, {})
    assert [each.getMessage() for each in caplog.records] == [
        "The sink of the payload log of shop/Model#abc fails, and is tried again: OSError: [Errno 28] No "
        "space left on s3://***@bucket"
    ]


def test_a_sink_that_hangs_costs_nothing_but_samples(sink: Sink) -> None:
    sink.hold.clear()
    writer = writer_to(sink)
    writer.offer(sample())
    assert sink.called.acquire(timeout=DEADLINE_S)
    for _ in range(20):
        writer.offer(sample())
    assert writer.dropped == {"queue": 15}
    writer.close(0.05)
    assert writer.dropped == {"queue": 15, "stop": 6}
    assert {labels: value for _, labels, value in writer.counts(("i", "d"))} == {
        ("i", "d"): 0,
        ("i", "d", "queue"): 15,
        ("i", "d", "stop"): 6,
    }
    sink.hold.set()


@each_case(
    ("redact", "dropped"),
    [
        (lambda event: 1 / 0, {"redact": 1}),
        (lambda event: sys.exit(), {"redact": 1}),
        (lambda event: 5, {"redact": 1}),
        (lambda event: None, {}),
    ],
)
def test_nothing_is_written_that_the_function_has_not_returned(redact: Any, dropped: Any, sink: Sink) -> None:
    writer = writer_to(sink, redact)
    writer.offer(sample(b"", b"secret"))
    writer.close(DEADLINE_S)
    assert not sink.files
    assert writer.dropped == dropped


@each_case("is_over", [False, True])
def test_a_request_that_ends_after_the_options_have_changed_is_dropped(is_over: bool, tmp_path: Path) -> None:
    sink = tmp_path / str(is_over)
    begun, goes_on = tmp_path / f"{is_over}-begun", tmp_path / f"{is_over}-on"

    async def answer(number: int) -> int:
        if number == 2:
            begun.touch()
            while not goes_on.exists():  # noqa: ASYNC110 - another process says it
                await asyncio.sleep(0.001)
        return number

    with local_instance() as client:
        app = serve.deployment(answer).options(name="d", max_ongoing_requests=2)

        def run(**options: Any) -> Any:
            logging = {"sink": str(sink), "mode": "response", **options}
            return client.run(app.options(payload_logging=logging).bind(), route_prefix=None)

        handle = run()
        late = handle.remote(2)
        poll_for(begun.exists)
        run(**({"sampling_ratio": 0.0} if is_over else {"redact": hide}))
        goes_on.touch()
        assert late.result() == 2
        assert handle.remote(1).result() == 1
        assert metric("payload_log_dropped") == {"stop": 1}
    assert [each["data"] for each in lines_in(str(sink))] == ([] if is_over else [1])


def test_payloads_of_a_child_process_are_in_the_sink_and_counted(tmp_path: Path) -> None:
    async def double(request: Any) -> Any:
        return {"twice": 2 * (await request.json())["n"], "card": "1234"}

    logging = {"sink": str(tmp_path), "flush_period_s": 0.1, "redact": hide}
    with local_instance(http_options={"port": 0}) as client:
        app = serve.deployment(double).options(isolation="process", payload_logging=logging)
        client.run(app.bind(), route_prefix="/")
        (url,) = client.http_urls()
        assert json.loads(post(url, {"n": 2, "card": "5678"}))["twice"] == 4
        post(f"{url}/wrong", {"n": 1})
        # The worker reads them each second.
        poll_for(lambda: metric("payload_log_dropped") == {"redact": 1})
        (written,) = metric("payload_log_requests").values()
        client.run(app.options(payload_logging={**logging, "mode": "request"}).bind(), route_prefix="/")
        post(f"{url}/changed", {"n": 1})
    assert written == 1
    assert [(each["type"], each["data"]) for each in lines_in(str(tmp_path))] == [
        ("daskserve.request", {"n": 2, "card": "***"}),
        ("daskserve.response", {"twice": 4, "card": "***"}),
        ("daskserve.request", {"n": 1}),
    ]


def test_a_wrong_option_says_so() -> None:
    with pytest.raises(ValueError, match="relative path"):
        PayloadLoggingConfig(sink="here")
    with pytest.raises(ValueError, match="import path"):
        PayloadLoggingConfig(sink="/a", redact="no path")
    assert "secret" not in repr(PayloadLoggingConfig(sink="s3://key:secret@bucket"))
