"""The adapter to Celery, with its broker in memory and in Redis, on an instance in this process."""

from __future__ import annotations

import gc
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import quick_instance
from redis_servers import redis_server

import daskserve as serve
from daskserve.data.tasks.celery_adapter import CeleryTaskProcessorAdapter
from daskserve.schema import CeleryAdapterConfig
from daskserve.testing import local_instance

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]
RAY = "ray.serve.task_processor.CeleryTaskProcessorAdapter"


@pytest.fixture(scope="module", params=["memory", "redis"])
def places(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    pytest.importorskip("celery")
    if request.param == "memory":
        yield {"broker_url": "memory://", "backend_url": "cache+memory://"}
        return
    with redis_server(tmp_path_factory.mktemp("redis")) as url:
        yield {"broker_url": url, "backend_url": url}


@pytest.fixture(scope="module", autouse=True)
def client() -> Iterator[serve.Client]:
    with local_instance() as client:
        yield client
    gc.collect()  # Celery leaves connections to this, whose warnings are ignored here only


def configured(places: dict[str, Any], **options: Any) -> serve.tasks.TaskProcessorConfig:
    name = options.pop("name", f"q-{uuid.uuid4().hex[:8]}")
    kept = CeleryAdapterConfig(
        **places, task_custom_config={"retry_backoff": False, "default_retry_delay": 0}
    )
    return serve.tasks.TaskProcessorConfig(queue_name=name, adapter=RAY, adapter_config=kept, **options)


def run(config: serve.tasks.TaskProcessorConfig, cls: type, **options: Any) -> None:
    made = serve.deployment(max_ongoing_requests=3, **options)(
        serve.tasks.task_consumer(task_processor_config=config)(cls)
    )
    serve.run(made.bind())


def test_a_program_of_ray_serve_runs_its_tasks_through_celery(places: dict[str, Any]) -> None:
    class Sums:
        @serve.tasks.task_handler
        def add(self, x: int, y: int = 1) -> int:
            return x + y

        @serve.tasks.task_handler(name="double")
        async def twice(self, x: int) -> int:
            return 2 * x

    config = configured(places)
    tasks = serve.tasks.instantiate_adapter_from_config(config)
    assert isinstance(tasks, CeleryTaskProcessorAdapter)
    before = tasks.enqueue_task_sync("add", args=[1], kwargs={"y": 2})
    assert before.status == "PENDING"
    run(config, Sums, num_replicas=2)
    ids = [
        tasks.enqueue_task_sync("double", [number], id=f"{config.queue_name}-{number}").id
        for number in range(20)
    ]
    assert tasks.wait_for_task_sync(before.id, 30).result == 3
    assert [tasks.wait_for_task_sync(id, 30).result for id in ids] == [2 * number for number in range(20)]
    assert len(tasks.health_check_sync()) == 2
    assert len(tasks.get_metrics_sync()) == 2
    serve.delete("default")
    left = tasks.enqueue_task_sync("add", [1])
    assert tasks.wait_for_task_sync(left.id, 0.3).status == "PENDING"
    tasks.shutdown()


def test_a_rollout_or_a_killed_process_is_no_attempt_of_a_task(
    places: dict[str, Any], tmp_path: Path
) -> None:
    if places["broker_url"].startswith("memory"):
        pytest.skip("this broker forgets what a consumer that stops has received")
    mark = tmp_path / "killed"

    class Slow:
        @serve.tasks.task_handler
        def work(self, x: int) -> int:
            if x == 0 and not mark.exists():
                mark.touch()
                os._exit(1)
            time.sleep(0.1)
            return x

    config = configured(places, max_retries=0)
    tasks = serve.tasks.instantiate_adapter_from_config(config)
    ids = [tasks.enqueue_task_sync("work", [number]).id for number in range(30)]
    for version in "123":
        run(config, Slow, num_replicas=2, isolation="process", version=version)
    assert [tasks.wait_for_task_sync(id, 60).result for id in ids] == list(range(30))
    serve.delete("default")
    tasks.shutdown()


def test_tasks_that_fail_or_have_no_handler_become_dead_letters(places: dict[str, Any]) -> None:
    seen: list[Any] = []

    class Bad:
        @serve.tasks.task_handler
        def bad(self, x: int) -> None:
            raise ValueError(f"bad {x}")

    failed, unknown = (f"{each}-{uuid.uuid4().hex[:8]}" for each in ("failed", "unknown"))
    config = configured(
        places, max_retries=1, failed_task_queue_name=failed, unprocessable_task_queue_name=unknown
    )
    tasks = serve.tasks.instantiate_adapter_from_config(config)
    run(config, Bad)
    bad = tasks.enqueue_task_sync("bad", [7])
    found = tasks.wait_for_task_sync(bad.id, 30)
    assert (found.status, found.result) == ("FAILURE", "ValueError: bad 7")
    tasks.enqueue_task_sync("nothing", [8])
    serve_letters(places, failed, "bad", seen)
    serve_letters(places, unknown, "nothing", seen)
    assert seen[0][:3] == (bad.id, "bad 7", [7])
    assert seen[1][0] == "nothing"
    serve.delete("default")
    tasks.shutdown()


def serve_letters(places: dict[str, Any], queue: str, name: str, seen: list[Any]) -> None:
    """Consume the letters of a queue in this program."""
    letters = serve.tasks.instantiate_adapter_from_config(configured(places, name=queue))
    letters.register_task_handle(lambda *parts: seen.append(parts), name)
    before = len(seen)
    letters.start_consumer()
    quick_instance.poll_for(lambda: len(seen) > before, what=lambda: f"no letter in {queue}: {seen}")
    letters.shutdown()


def test_a_wrong_config_is_an_error_that_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="takes a CeleryAdapterConfig"):
        CeleryTaskProcessorAdapter(serve.tasks.TaskProcessorConfig(queue_name="q"))
