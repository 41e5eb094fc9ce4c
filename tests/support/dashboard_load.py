"""A deployment and a load that produce every event that the dashboards show."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from dask_processes import ExternalCluster, fetch

import daskserve as serve
from daskserve.errors import ServeError
from daskserve.request_router import RequestRouter


class Variant:
    """A model of a multiplexed deployment, which takes some time to unload."""

    def close(self) -> None:
        time.sleep(0.01)


class Sulking(RequestRouter):
    """A request router that fails for each tenth request, so that daskserve routes it."""

    def initialize_state(self) -> None:
        self.count = 0

    async def choose_replicas(self, candidate_replicas: Any, pending_request: Any = None) -> Any:
        self.count += 1
        if self.count % 10 == 0:
            raise RuntimeError("as planned")
        return [candidate_replicas]


def redact(event: dict[str, Any]) -> dict[str, Any]:
    """Redact an event; raise an error for answers that are errors."""
    if event.get("status") == 500:
        raise ValueError("as planned")
    return event


class Model:
    """Answers, fails, waits, blocks, batches and streams on request; files make it fail checks or starts."""

    def __init__(self, folder: str) -> None:
        self.name = uuid.uuid4().hex
        self.illness = Path(folder, "illness")
        if Path(folder, "stillborn").exists():
            time.sleep(1)
            raise RuntimeError("as the file says")

    def check_health(self) -> None:
        if not self.illness.exists():
            return
        patient = self.illness.read_text() or self.name
        self.illness.write_text(patient)
        if patient == self.name:
            raise RuntimeError("as the file says")

    async def __call__(self, request: Any) -> Any:
        kind = request.query_params.get("kind", "good")
        if kind == "bad":
            raise ValueError("as requested")
        if kind == "hang":
            await asyncio.Event().wait()
        if kind == "block":
            time.sleep(0.15)
        if kind == "batch":
            return await self.embed(1)
        if kind == "stream":
            return self.stream()
        if kind == "generate":
            return " ".join([word async for word in self.generate()])
        if kind == "variant":
            await self.variant(serve.get_multiplexed_model_id())
        await asyncio.sleep(0.15 if kind == "slow" else 0.004)
        return "well"

    async def stream(self) -> Any:
        for number in range(5):
            await asyncio.sleep(0.002)
            yield f"{number}\n"

    @serve.batch(max_batch_size=8, batch_wait_timeout_s=0.1)
    async def embed(self, items: list[int]) -> list[str]:
        await asyncio.sleep(0.002)
        return [str(len(items))] * len(items)

    # Four calls begin within the budget and outgrow it, so that some of them are preempted.
    @serve.batching.continuous_batch(max_slots=4, max_cost=20, cost_fn=lambda: 5)
    async def generate(self, active: Any) -> list[str]:
        await asyncio.sleep(0.02)
        for each in active:
            if len(each.outputs) >= 10:
                each.finish()
        return ["word"] * len(active)

    @serve.multiplexed(max_num_models_per_replica=1)
    async def variant(self, model_id: str) -> Variant:
        await asyncio.sleep(0.01)
        if model_id == "broken":
            raise RuntimeError("as requested")
        return Variant()

    def compute(self, request: Any) -> str:
        time.sleep(1.5)
        return "done"


class Front:
    """Calls the model by handle."""

    def __init__(self) -> None:
        self.model = serve.connect().get_handle("model")

    async def __call__(self, request: Any) -> Any:
        return await self.model.remote(**request.query_params)


@serve.accept_batch
def classic(requests: list[Any]) -> list[str]:
    return ["classic"] * len(requests)


def scaled(request: Any) -> str:
    time.sleep(0.02)
    return "scaled"


def deploy(client: serve.Client, folder: Path, num_replicas: int = 2) -> None:
    """Deploy the backends that the dashboards show."""
    config: dict[str, Any] = {
        "num_replicas": num_replicas,
        "max_concurrent_queries": 4,
        "max_queued_requests": 4,
        "method_header": True,
        "health_check_period_s": 0.3,
        "health_check_threshold": 8,
        "experimental_graceful_shutdown_wait_loop_s": 0.1,
        "hedging_config": {"quantile": 0.5, "budget": 0.5},
        "request_router_config": {"request_router_class": Sulking},
        "payload_logging": {"sink": str(folder / "payloads"), "sampling_ratio": 1.0, "redact": redact},
    }
    client.create_backend("model", Model, str(folder), config=config)
    client.create_endpoint("model", backend="model", route="/model")
    client.create_backend("front", Front)
    client.create_endpoint("front", backend="front", route="/front")
    batching = {"max_batch_size": 8, "batch_wait_timeout": 0.2}
    client.create_backend("classic", classic, config=batching)
    client.create_endpoint("classic", backend="classic", route="/classic")
    bounds = {"min_replicas": 1, "max_replicas": 3, "target_ongoing_requests": 0.5}
    client.create_backend("scaled", scaled, config={"autoscaling_config": bounds})
    client.create_endpoint("scaled", backend="scaled", route="/scaled")


class Traffic:
    """The requests of many clients of a proxy; their outcomes are ignored."""

    def __init__(self, url: str, pause: Callable[[], float] = lambda: 1.0) -> None:
        self._url = url
        self._pause = pause
        self._is_over = threading.Event()
        plan: Sequence[tuple[float, Callable[[], Any]]] = [
            (0.05, lambda: self.ask("/model")),
            (0.02, lambda: self.ask("/scaled")),
            (0.02, lambda: self.ask("/scaled")),
            (0.1, lambda: self.ask("/front")),
            (0.1, lambda: self.ask("/model?kind=batch")),
            (0.1, lambda: self.ask("/model?kind=batch")),
            (0.1, lambda: self.ask("/classic")),
            (0.3, lambda: self.ask("/model?kind=stream")),
            (0.2, lambda: self.ask("/front?kind=slow")),
            *[(0.1, lambda: self.ask("/model?kind=generate"))] * 6,
            *[
                (every_s, partial(self.ask, "/model?kind=variant", {"serve_multiplexed_model_id": name}))
                for name, every_s in (("one", 0.1), ("two", 0.3), ("three", 0.4), ("broken", 0.5))
            ],
            (0.4, lambda: self.ask("/front?kind=bad")),
            (0.5, lambda: self.ask("/model?kind=bad")),
            (0.7, lambda: self.ask("/nowhere")),
            (0.9, lambda: self.ask("/model?kind=block")),
            (1.0, lambda: self.ask("/model?kind=hang", {"X-Request-Timeout-Seconds": "0.2"})),
            (1.1, lambda: self.ask("/model?kind=hang", timeout_s=0.15)),
            (1.3, self.burst),
            (1.6, self.compute),
        ]
        self._pool = ThreadPoolExecutor(24)
        self._threads = [threading.Thread(target=self._repeat, args=each) for each in plan]

    def ask(self, target: str, headers: Mapping[str, str] | None = None, timeout_s: float = 5.0) -> None:
        with suppress(OSError, http.client.HTTPException):
            fetch(self._url + target, headers=headers, timeout_s=timeout_s)

    def burst(self) -> None:
        """Send more concurrent requests than replicas and queues accept."""
        list(self._pool.map(self.ask, ["/model?kind=slow", "/front?kind=slow"] * 12))

    def compute(self) -> None:
        """Disconnect from a plain function, which runs on."""
        self.ask("/model", {"X-SERVE-CALL-METHOD": "compute", "X-Request-Timeout-Seconds": "0.2"})

    def _repeat(self, every_s: float, act: Callable[[], Any]) -> None:
        while not self._is_over.wait(every_s * self._pause()):
            act()

    def __enter__(self) -> Traffic:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_over.set()
        for each in self._threads:
            each.join()
        self._pool.shutdown()


def cut(dask_worker: Any) -> None:
    """Break the connections of all channels of this worker."""
    for host in set(dask_worker.state.actors.values()):
        for channel in list(host.connection.channels._serving):
            with suppress(OSError):  # the other end may have closed it already
                channel._transport.sock.shutdown(socket.SHUT_RDWR)


@contextmanager
def trouble(client: serve.Client, external: ExternalCluster, folder: Path, wanted: int = 3) -> Iterator[None]:
    """Make a replica unhealthy, starts fail, a goal wait for room, and connections break."""
    hopeless = {"num_cpus": 1000.0}
    client.create_backend("hopeless", scaled, actor_options=hopeless, timeout_s=600, blocking=False)
    external.client.run(cut)
    (folder / "illness").write_text("")
    (folder / "stillborn").touch()
    with suppress(ServeError):
        client.update_backend_config("model", {"num_replicas": wanted})
    (folder / "stillborn").unlink()
    try:
        yield
    finally:
        (folder / "illness").unlink(missing_ok=True)
        client.delete_backend("hopeless")
