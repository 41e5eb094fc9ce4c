"""Tasks over HTTP, on an instance in this process."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tables import each_case

import daskserve as serve
from daskserve.testing import local_instance


class Work:
    @serve.tasks.task_handler
    def add(self, x: int, y: int = 1) -> int:
        return x + y

    @serve.tasks.task_handler
    def bad(self) -> None:
        raise ValueError("bad")

    @serve.tasks.task_handler
    def odd(self) -> Any:
        return {(1, 2): float("nan"), "items": ({float("inf")}, 1.5, None)}

    @serve.tasks.task_handler
    def endless(self) -> list[Any]:
        found: list[Any] = []
        found.append(found)
        return found

    @serve.tasks.task_handler
    async def steps(self) -> set[int]:
        for step in range(3):
            serve.tasks.get_task_context().report_progress(step)
            time.sleep(0.15)
        return {1}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    kept = serve.tasks.InstanceAdapterConfig(poll_interval_s=0.01, max_queue_length=2, max_payload_bytes=1000)
    config = serve.tasks.TaskProcessorConfig(queue_name="q", adapter_config=kept, max_retries=0)
    with local_instance(http_options={"port": 0}) as client:
        consumer = serve.tasks.task_consumer(task_processor_config=config)(Work)
        serve.run(serve.deployment(consumer).bind(), name="work", route_prefix=None)
        serve.run(serve.tasks.task_api(consumer), name="api", route_prefix="/work")
        with httpx.Client(base_url=f"{client.http_urls()[0]}/work", timeout=30) as http:
            yield http


def test_a_task_is_submitted_polled_and_waited_for(http: httpx.Client) -> None:
    answer = http.post("/tasks/add", json={"x": 1})
    assert (answer.status_code, answer.json()["status"]) == (202, "PENDING")
    place = answer.headers["location"]
    assert place == f"/work/tasks/{answer.json()['id']}"
    done = http.get(f"{place.removeprefix('/work')}?wait_s=20").json()
    assert (done["status"], done["result"], done["attempts"]) == ("SUCCESS", 2, 1)
    waited = http.post("/tasks/add?wait_s=20&priority=3", json=[1, 5])
    assert (waited.status_code, waited.json()["result"]) == (200, 6)


def test_values_that_json_does_not_have_are_null_or_text(http: httpx.Client) -> None:
    answer = http.post("/tasks/odd?wait_s=20")
    assert answer.json()["result"] == {"(1, 2)": None, "items": [[None], 1.5, None]}
    answer = http.post("/tasks/endless?wait_s=20")
    assert (answer.status_code, "contains itself" in answer.json()["result"]) == (200, True)


def test_an_idempotency_key_is_the_id(http: httpx.Client) -> None:
    def post(x: int) -> httpx.Response:
        return http.post("/tasks/add?wait_s=20", json={"x": x}, headers={"idempotency-key": "my key"})

    assert [post(1).json()["id"] for _ in range(2)] == ["my key"] * 2
    assert http.get("/tasks/my%20key").json()["attempts"] == 1
    assert post(2).status_code == 409


def test_an_error_is_shown_without_its_traceback(http: httpx.Client) -> None:
    failed = http.post("/tasks/bad?wait_s=20").json()
    assert (failed["status"], failed["error"]) == ("FAILURE", "ValueError: bad")
    assert "Traceback" not in json.dumps(failed)


def test_progress_is_a_stream_of_events(http: httpx.Client) -> None:
    place = http.post("/tasks/steps").json()["id"]
    events = []
    with http.stream("GET", f"/tasks/{place}/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in stream.iter_lines() if line]
    for kind, data in zip(lines[::2], lines[1::2], strict=True):
        events.append((kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert [kind for kind, _ in events] == ["progress"] * (len(events) - 1) + ["end"]
    assert 2 in [event["progress"] for _, event in events]
    assert (events[-1][1]["status"], events[-1][1]["result"]) == ("SUCCESS", [1])


def test_a_task_that_waits_is_cancelled_and_one_that_has_ended_is_not(http: httpx.Client) -> None:
    later = http.post("/tasks/add?delay_s=100", json={"x": 1}).json()["id"]
    cancelled = http.delete(f"/tasks/{later}")
    assert (cancelled.status_code, cancelled.json()["status"]) == (202, "REVOKED")
    done = http.post("/tasks/add?wait_s=20", json={"x": 1}).json()["id"]
    assert http.delete(f"/tasks/{done}").status_code == 409


def test_a_full_queue_answers_429(http: httpx.Client) -> None:
    ids = [http.post("/tasks/add?delay_s=100", json={"x": 1}).json()["id"] for _ in range(2)]
    refused = http.post("/tasks/add", json={"x": 1})
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    for id in ids:
        http.delete(f"/tasks/{id}")


@each_case(
    ("method", "path", "options", "status"),
    [
        ("POST", "/tasks/unknown", {}, 404),
        ("GET", "/tasks/unknown", {}, 404),
        ("GET", "/tasks/unknown/events", {}, 404),
        ("DELETE", "/tasks/unknown", {}, 404),
        ("GET", "/elsewhere", {}, 404),
        ("POST", "/tasks/add", {"content": b"x=1"}, 415),
        ("POST", "/tasks/add", {"content": b"{", "headers": {"content-type": "application/json"}}, 400),
        ("POST", "/tasks/add", {"json": 3}, 400),
        ("POST", "/tasks/add", {"json": ["x" * 1001]}, 413),
        ("POST", "/tasks/add?priority=1000", {}, 400),
        ("POST", "/tasks/add?priority=1.5", {}, 400),
        ("POST", "/tasks/add?wait_s=nan", {}, 400),
        ("POST", "/tasks/add", {"headers": {"idempotency-key": "a/b"}}, 400),
        ("POST", "/tasks/add", {"headers": {"idempotency-key": "x" * 201}}, 400),
    ],
)
def test_wrong_requests_get_their_status(
    method: str, path: str, options: dict[str, Any], status: int, http: httpx.Client
) -> None:
    answer = http.request(method, path, **options)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


def test_task_api_takes_a_consumer() -> None:
    with pytest.raises(TypeError, match="task_consumer"):
        serve.tasks.task_api(dict)


async def test_an_application_outside_of_the_instance_has_the_adapter(http: httpx.Client) -> None:
    kept = serve.tasks.InstanceAdapterConfig(max_payload_bytes=1000)
    config = serve.tasks.TaskProcessorConfig(queue_name="q", adapter_config=kept)
    adapter = await asyncio.to_thread(serve.tasks.instantiate_adapter_from_config, config)
    transport = httpx.ASGITransport(serve.tasks.task_api(adapter))
    async with httpx.AsyncClient(transport=transport, base_url="http://outside") as outside:
        answer = await outside.post("/tasks/add?wait_s=20", json=[2])
        assert (answer.status_code, answer.json()["result"]) == (200, 3)
        assert (await outside.post("/tasks/add", json=["x" * 2000])).status_code == 413
