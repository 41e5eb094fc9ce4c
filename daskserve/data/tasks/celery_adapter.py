"""The adapter of queues at any broker that Celery supports, with the options of Ray Serve's adapter.

Celery's worker runs in a thread of the replica, with a pool of threads, in which each handler waits for the
replica. A task is acknowledged after its end, so no task is lost if a consumer is killed. Unlike in
daskserve's own queues, a task with an id may run more than once, and a waiting task is cancelled only when a
consumer gets it.

A Celery worker usually owns its process: it handles signals, and its event loop is global. Replicas may share
a process, so this worker handles no signals and does not use the global loop.
"""

from __future__ import annotations

import importlib
import logging
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from typing import Any

from daskserve.data.tasks.adapter import AsyncCapability, TaskProcessorAdapter
from daskserve.data.tasks.config import CeleryAdapterConfig, TaskProcessorConfig, TaskResult
from daskserve.data.tasks.consumer import Lost, Released
from daskserve.data.tasks.errors import TaskQueueError
from daskserve.data.tasks.payloads import checked_arguments
from daskserve.errors import BadRequestError, ServeError

logger = logging.getLogger("daskserve.tasks")

#: Timeout for consumers to answer pings and inspections, in seconds.
ASK_S = 1.0
#: Slightly longer than the time that a worker's loop waits for a message.
LOOP_S = 4.0
#: The delay before the first retry, in seconds, which doubles up to the maximum.
BACKOFF_S, MAX_BACKOFF_S = 1, 60
#: Maximum pause before a task that its replica cannot start returns to the queue, in seconds.
RETURN_S = 0.2
#: Number of times that a task may lose its process; after one more loss, the task has failed.
MAX_LOSSES = 10
#: The header of a message that counts these losses.
LOSSES = "daskserve_losses"

SETTINGS: Mapping[str, Any] = {
    "task_acks_late": True,
    "task_reject_on_worker_lost": True,
    "task_track_started": True,
    "worker_prefetch_multiplier": 1,
    "worker_hijack_root_logger": False,
    "broker_connection_retry_on_startup": True,
}


class CeleryTaskProcessorAdapter(TaskProcessorAdapter):
    """The adapter of a queue at a broker of Celery."""

    def __init__(self, config: TaskProcessorConfig) -> None:
        super().__init__()
        if not isinstance(config.adapter_config, CeleryAdapterConfig):
            raise TypeError(
                f"adapter_config is of type {type(config.adapter_config).__name__}; "
                f"{type(self).__name__} takes a CeleryAdapterConfig"
            )
        if config.schedules:
            raise ValueError("schedules are for queues of daskserve's own; with Celery, use celery beat")
        self._async_capabilities = set(AsyncCapability)
        self.config = config
        self._options = config.adapter_config
        self._concurrency = 1
        self._app: Any = None
        self._worker: Any = None
        self._thread: threading.Thread | None = None
        self._has_paused = threading.Event()

    @property
    def app(self) -> Any:
        """The application of Celery."""
        if self._app is None:
            raise TaskQueueError("The adapter is not connected; call initialize() first.")
        return self._app

    def initialize(self, consumer_concurrency: int = 1) -> None:
        """Create the Celery application, which connects on first use."""
        self._concurrency = self._options.worker_concurrency or consumer_concurrency
        app = _celery().Celery(
            self.config.queue_name,
            broker=self._options.broker_url,
            backend=self._options.backend_url,
            set_as_current=False,
        )
        app.conf.update({**SETTINGS, "task_default_queue": self.config.queue_name})
        if self._options.broker_transport_options is not None:
            app.conf.broker_transport_options = self._options.broker_transport_options
        app.conf.update(self._options.app_custom_config or {})
        self._app, self._letters = app, _Letters(self.config, app)

    def register_task_handle(self, func: Callable[..., Any], name: str | None = None) -> None:
        """Add a handler; its failed tasks are retried up to ``max_retries`` times."""
        errors = importlib.import_module("celery.exceptions")
        options: dict[str, Any] = {
            "autoretry_for": (Exception,),
            "max_retries": self.config.max_retries,
            "retry_backoff": BACKOFF_S,
            "retry_backoff_max": MAX_BACKOFF_S,
            **(self._options.task_custom_config or {}),
        }
        options["dont_autoretry_for"] = (*options.get("dont_autoretry_for", ()), errors.Reject)

        def handler(task: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return func(*args, **kwargs)
            except Released as error:
                self._has_paused.wait(RETURN_S)  # before that, this consumer might get the task again
                raise errors.Reject(error, requeue=True) from None
            except Lost:
                losses = int((task.request.headers or {}).get(LOSSES, 0)) + 1
                if losses > MAX_LOSSES:
                    raise
                again = task.signature_from_request(task.request, args, kwargs, headers={LOSSES: losses})
                again.apply_async()
                raise errors.Ignore from None

        # By default, Celery adds tasks to all applications of a process.
        name = name or func.__name__
        on_failure = partial(self._letters.failed, name)
        self.app.task(name=name, bind=True, on_failure=on_failure, shared=False, lazy=False, **options)(
            handler
        )

    # ---- submitting and querying

    def enqueue_task_sync(
        self, task_name: str, args: Any = None, kwargs: Any = None, **options: Any
    ) -> TaskResult:
        """Submit a task.

        Parameters
        ----------
        id, delay_s, at, priority
            As in `DurableAdapter.enqueue_task_sync`, but a task with an ``id`` may run more than once.
        **options
            Further options of Celery's ``send_task``.
        """
        id = options.pop("id", None) or options.pop("task_id", None) or str(uuid.uuid4())
        sent: dict[str, Any] = {"queue": self.config.queue_name, "task_id": id}
        if (delay_s := options.pop("delay_s", None)) is not None:
            sent["countdown"] = delay_s
        if (at := options.pop("at", None)) is not None:
            sent["eta"] = at if isinstance(at, datetime) else datetime.fromtimestamp(at, UTC)
        args, kwargs = checked_arguments(args, kwargs)
        _called(self.app.send_task, task_name, args=list(args), kwargs=kwargs, **sent, **options)
        return TaskResult(id=id, status="PENDING")

    def get_task_status_sync(self, task_id: str) -> TaskResult:
        """Return the status of a task in Celery; an unknown task is ``PENDING``."""
        found = _called(self.app.backend.get_task_meta, task_id)
        status, result = str(found["status"]), found.get("result")
        if isinstance(result, BaseException):
            result = f"{type(result).__name__}: {result}"
        return TaskResult(
            id=task_id,
            status=status,
            result=result if status in ("SUCCESS", "FAILURE") else None,
            progress=result if status == "PROGRESS" else None,
            traceback=str(found.get("traceback") or ""),
        )

    def cancel_task_sync(self, task_id: str) -> bool:
        """Revoke a task but leave a running one alone; return True if it had not started."""
        status = self.get_task_status_sync(task_id).status
        _called(self.app.control.revoke, task_id)
        return status in ("PENDING", "RETRY", "REVOKED")

    def get_metrics_sync(self) -> dict[str, Any]:
        """Return the statistics of Celery's consumers, by their names."""
        return dict(_called(self.app.control.inspect(timeout=ASK_S).stats) or {})

    def health_check_sync(self) -> list[dict[str, Any]]:
        """Return the answers of Celery's consumers to a ping."""
        return list(_called(self.app.control.ping, timeout=ASK_S))

    # ---- consuming

    def start_consumer(self, **kwargs: Any) -> None:
        """Run a worker of Celery in a thread of this process."""
        if self._thread is not None:
            return
        self.app.finalize()
        _signals().task_unknown.connect(self._letters.unknown)
        name = f"{self.config.queue_name}@{uuid.uuid4().hex[:12]}"
        self._worker = self.app.WorkController(
            hostname=name,
            pool_cls=_thread_pool(self.app),
            concurrency=self._concurrency,
            queues=[self.config.queue_name],
            without_gossip=True,
            without_mingle=True,
            use_eventloop=False,
            **kwargs,
        )
        self._has_paused.clear()
        self._thread = threading.Thread(target=self._consume, name="daskserve-celery", daemon=True)
        self._thread.start()

    def _consume(self) -> None:
        self.app.set_current()
        try:
            self._worker.start()
        except Exception:  # nothing waits for this thread's result
            logger.exception("Queue %r: Celery's worker ended", self.config.queue_name)

    def pause_consumer(self) -> None:
        """Take no more tasks; those that wait in this process return to the queue."""
        consumer: Any = None if self._worker is None else self._worker.consumer

        def pause() -> None:
            consumer.cancel_task_queue(self.config.queue_name)
            self._has_paused.set()

        if consumer is not None and consumer.task_consumer is not None:
            consumer.call_soon(pause)

    def stop_consumer(self, timeout: float = 10.0) -> None:
        """Take no more tasks, and wait for running ones; unacknowledged tasks go to another consumer."""
        thread, self._thread = self._thread, None
        worker, self._worker = self._worker, None
        if thread is None:
            return
        _signals().task_unknown.disconnect(self._letters.unknown)
        # The worker's loop must not read from a connection that is being closed.
        states = importlib.import_module("celery.bootsteps")
        if worker.consumer is not None:
            worker.consumer.blueprint.state = states.CLOSE
            thread.join(min(timeout, LOOP_S))
            worker.consumer.blueprint.state = states.RUN
        # Celery's own wait for tasks has no time limit.
        stopping = threading.Thread(target=worker.stop, name="daskserve-celery-stop", daemon=True)
        stopping.start()
        stopping.join(timeout)
        if stopping.is_alive():
            logger.warning("Queue %r: its tasks still run after %s s", self.config.queue_name, timeout)

    def shutdown(self) -> None:
        """Disconnect."""
        self.stop_consumer()
        if self._app is not None:
            self._app.close()


class _Letters:
    """Sends the dead letters of one queue, with their arguments in Ray Serve's order."""

    def __init__(self, config: TaskProcessorConfig, app: Any) -> None:
        self._config, self._app = config, app

    def failed(self, name: str, exc: Exception, id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        """Send the dead letter of a task that has failed permanently."""
        parts = [id, str(exc), list(args), dict(kwargs), str(einfo)]
        self._send(name, self._config.failed_task_queue_name, parts)

    def unknown(
        self, sender: Any = None, name: str = "", id: str = "", message: Any = None, exc: Any = None, **_: Any
    ) -> None:
        """Send the dead letter of a task without a handler; all workers of this process send the signal."""
        if sender is not None and sender.app is self._app:
            parts = [name, id, str(message.body), str(exc), {}]
            self._send(name, self._config.unprocessable_task_queue_name, parts)

    def _send(self, name: str, queue: str | None, args: list[Any]) -> None:
        if queue is None:
            return
        try:
            _called(self._app.send_task, name, args=args, queue=queue)
        except ServeError as error:
            logger.error("Queue %r: a dead letter is lost: %s", self._config.queue_name, error)


def _called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of Celery, with daskserve's errors."""
    try:
        return function(*args, **kwargs)
    except ServeError:
        raise
    except (TypeError, ValueError) as error:
        raise BadRequestError(f"Celery cannot send this: {error}") from error
    except Exception as error:  # each broker has its own error classes
        raise TaskQueueError(
            f"Celery's broker or result backend cannot be used: {type(error).__name__}: {error}"
        ) from error


def _celery() -> Any:
    try:
        return importlib.import_module("celery")
    except ImportError as error:
        raise ValueError(
            f'the Python package celery cannot be imported ({error}); pip install "daskserve[celery]" on '
            "every worker and where tasks are submitted"
        ) from error


def _thread_pool(app: Any) -> type[Any]:
    """Return Celery's pool of threads; the application is the current one in each thread."""
    base = importlib.import_module("celery.concurrency.thread").TaskPool

    def start(pool: Any, *args: Any, **options: Any) -> None:
        base.__init__(pool, *args, **options)
        pool.executor = ThreadPoolExecutor(pool.limit, "daskserve-celery", initializer=app.set_current)

    return type("ThreadPool", (base,), {"__init__": start})


def _signals() -> Any:
    return importlib.import_module("celery.signals")
