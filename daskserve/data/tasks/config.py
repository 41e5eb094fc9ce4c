"""The options of queues of tasks, and the result of a task."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from daskserve.data.tasks.states import RetryRules
from daskserve.options.fields.base import ByteCount, Masked, Options, Secret
from daskserve.options.fields.secrets import masked, read_secret
from daskserve.options.queues import REDIS_SCHEMES

#: The adapter for each class of options.
INSTANCE = "daskserve.data.tasks.durable:InstanceTaskProcessorAdapter"
SQLITE = "daskserve.data.tasks.durable:SQLiteTaskProcessorAdapter"
REDIS = "daskserve.data.tasks.durable:RedisTaskProcessorAdapter"
CELERY = "daskserve.data.tasks.celery_adapter:CeleryTaskProcessorAdapter"
#: Ray Serve's default; the class of the options determines which of daskserve's adapters is used.
RAY_ADAPTER = "ray.serve.task_processor.CeleryTaskProcessorAdapter"

MAX_NAME = 200
#: Maximum of ``catch_up_s``: one year.
MAX_CATCH_UP_S = 31_622_400.0


class DurableOptions(Options):
    """The common options of daskserve's own queues."""

    lease_s: float = Field(
        30.0,
        ge=0.2,
        description="Time after which a task is given to another consumer if its consumer does not renew "
        "its lease, in seconds. Consumers renew leases three times as often.",
    )
    poll_interval_s: float = Field(
        0.1, ge=0.005, le=60.0, description="How often an idle consumer looks for tasks, in seconds."
    )
    backoff_s: float = Field(
        1.0, ge=0.0, description="Delay before the first retry, in seconds; it doubles with each retry."
    )
    max_backoff_s: float = Field(60.0, ge=0.0, description="Longest delay before a retry, in seconds.")
    jitter: float = Field(
        0.5, ge=0.0, le=1.0, description="Maximum share by which a retry's delay is randomly reduced."
    )
    max_losses: int = Field(
        10,
        ge=0,
        description="Number of times that the consumer of a task may be killed; after one more, the task is "
        "unprocessable.",
    )
    result_ttl_s: float = Field(
        86_400.0,
        ge=0.0,
        description="How long results, errors and ids of tasks that ended are kept, in seconds.",
    )
    max_queue_length: int = Field(
        100_000, ge=1, description="Number of waiting tasks from which on submitting fails."
    )
    max_payload_bytes: ByteCount = Field(
        1_048_576, ge=1, description="Size limit of a task's pickled arguments, and of its result, in bytes."
    )

    def rules(self, max_retries: int) -> RetryRules:
        """Return the rules of the tasks' states."""
        return RetryRules(
            max_retries,
            self.backoff_s,
            self.max_backoff_s,
            self.jitter,
            self.max_losses,
            self.result_ttl_s,
        )


class FileOptions(DurableOptions):
    """The options of queues that are kept in a file."""

    synchronous: bool = Field(
        False,
        description="Whether each change waits until it is on the disk, so that it survives a power "
        "loss. If not, changes survive the end of any process, but the last ones may be lost in a power "
        "loss; submitting is up to a hundred times as fast.",
    )


class InstanceAdapterConfig(FileOptions):
    """Options of a queue that the instance keeps next to its store."""

    poll_interval_s: float = Field(
        0.2,
        ge=0.005,
        le=60.0,
        description="How often the instance checks a queue for tasks that become due, in seconds, once "
        "for all its idle consumers. A new task reaches an idle consumer at once.",
    )


class SQLiteAdapterConfig(FileOptions):
    """Options of a queue in an SQLite file."""

    path: str = Field(
        "~/.daskserve/tasks.sqlite",
        min_length=1,
        description="Path of the file: absolute, or beginning with `~`. It must be on a disk of the "
        "machine on which all consumers run and tasks are submitted.",
    )

    @field_validator("path")
    @classmethod
    def _is_absolute(cls, value: str) -> str:
        if not os.path.isabs(os.path.expanduser(value)):
            raise ValueError(
                f"path is {value!r}, which depends on the working directory of each process; give an "
                "absolute path, or one that begins with ~"
            )
        return value

    @property
    def file(self) -> Path:
        return Path(self.path).expanduser()


class RedisAdapterConfig(DurableOptions):
    """Options of a queue in Redis."""

    url: Annotated[Secret, Masked(masked)] = Field(
        "redis://localhost:6379/0",
        description="URL of the server, such as `redis://localhost:6379/0`, or a reference to a variable "
        "or file.",
    )
    prefix: str = Field("daskserve", min_length=1, description="Prefix of the names of all keys.")

    @model_validator(mode="after")
    def _has_scheme(self) -> RedisAdapterConfig:
        if isinstance(self.url, str) and self.url.partition("://")[0] not in REDIS_SCHEMES:
            shown = ", ".join(f"{each}://" for each in REDIS_SCHEMES)
            raise ValueError(f"url must begin with one of {shown}")
        return self

    def read_url(self, variables: Mapping[str, str]) -> str:
        """Return the URL, after reading it from its environment variable or file if necessary."""
        return read_secret(self.url, "url", variables)


class CeleryAdapterConfig(Options):
    """Options of a queue at a broker of Celery, with Ray Serve's names."""

    broker_url: str = Field(description="URL of Celery's broker.", repr=False)
    backend_url: str = Field(description="URL of Celery's result backend.", repr=False)
    broker_transport_options: dict[str, Any] | None = Field(
        None, description="The ``broker_transport_options`` of Celery."
    )
    app_custom_config: dict[str, Any] | None = Field(None, description="Further settings of the Celery app.")
    task_custom_config: dict[str, Any] | None = Field(None, description="Further options of each task.")
    worker_concurrency: int | None = Field(
        None, ge=1, description="Number of threads of a consumer. Default: ``max_ongoing_requests``."
    )


_ADAPTERS: Mapping[type, str] = {
    InstanceAdapterConfig: INSTANCE,
    SQLiteAdapterConfig: SQLITE,
    RedisAdapterConfig: REDIS,
    CeleryAdapterConfig: CELERY,
}


class TaskSchedule(Options):
    """A task that is submitted on a schedule: once at each time, regardless of the number of consumers."""

    task: str = Field(min_length=1, description="Name of the handler.")
    cron: str | None = Field(
        None,
        description="Times at which a task is created, as a cron expression of five fields, such as `30 "
        "8 * * mon-fri`.",
    )
    every_s: float | None = Field(
        None, ge=1.0, description="Interval between two tasks in seconds, instead of ``cron``."
    )
    timezone: str = Field("UTC", description="Time zone of the cron expression, such as Europe/Paris.")
    args: list[Any] = Field(default_factory=list, description="Positional arguments of the handler.")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the handler.")
    priority: int = Field(0, ge=-100, le=100, description="Priority of its tasks.")
    catch_up_s: float = Field(
        60.0,
        ge=0.0,
        le=MAX_CATCH_UP_S,
        description="If no consumer ran at the time of a task, how late the task may still be created, "
        "in seconds. If several times were missed, only the last one gets a task.",
    )

    @model_validator(mode="after")
    def _has_one_time(self) -> TaskSchedule:
        if (self.cron is None) == (self.every_s is None):
            raise ValueError("a schedule needs cron or every_s, and not both")
        try:
            zone = ZoneInfo(self.timezone)
        except (ValueError, OSError, ZoneInfoNotFoundError):
            raise ValueError(f"timezone is {self.timezone!r}; give a name such as Europe/Paris") from None
        if self.cron is not None:
            try:
                if len(self.cron.split()) != 5:
                    raise CronSimError("it does not have five fields")
                next(CronSim(self.cron, datetime(2000, 1, 1, tzinfo=zone)))
            except (CronSimError, StopIteration) as error:
                raise ValueError(
                    f"cron is {self.cron!r}, which never occurs ({error}); give minute, hour, day of month, "
                    'month and weekday, for example "30 8 * * mon-fri"'
                ) from None
        return self


class TaskProcessorConfig(Options):
    """A queue of tasks: its name, its location, and how its tasks run. Consumers and submitters share it."""

    queue_name: str = Field(min_length=1, max_length=MAX_NAME, description="Name of the queue.")
    adapter: str | Callable[..., Any] | None = Field(
        None,
        description="The class of the adapter, or its import path. Default: the adapter that matches "
        "`adapter_config`.",
    )
    adapter_config: Any = Field(
        None,
        validate_default=True,
        description="The options of the adapter: `InstanceAdapterConfig`, `SQLiteAdapterConfig`, "
        "`RedisAdapterConfig`, or the options of your own adapter. Default: `InstanceAdapterConfig()`.",
    )
    max_retries: int | None = Field(
        3, ge=0, description="Maximum number of retries of a failed task. None: no limit."
    )
    slot_share: float = Field(
        0.25,
        ge=0.0,
        le=1.0,
        description="Share of a replica's `max_ongoing_requests` that tasks can claim, but at least one "
        "slot. Once tasks have held fewer slots for a second, they wait in the same queue as requests; the "
        "longer this queue, the less of the share they get. 0: tasks get only the slots that requests "
        "leave free.",
    )
    failed_task_queue_name: str | None = Field(
        None,
        min_length=1,
        max_length=MAX_NAME,
        description="Queue that gets the tasks that failed permanently.",
    )
    unprocessable_task_queue_name: str | None = Field(
        None,
        min_length=1,
        max_length=MAX_NAME,
        description="Queue that gets the tasks that no handler can run.",
    )
    schedules: dict[str, TaskSchedule] = Field(
        default_factory=dict, description="Tasks that consumers create at given times, by name."
    )

    @field_validator("adapter_config")
    @classmethod
    def _with_default(cls, value: Any) -> Any:
        return InstanceAdapterConfig() if value is None else value

    @model_validator(mode="after")
    def _has_other_queues(self) -> TaskProcessorConfig:
        for name in ("failed_task_queue_name", "unprocessable_task_queue_name"):
            if getattr(self, name) == self.queue_name:
                raise ValueError(f"{name} is the queue itself; give it another name")
        return self

    @property
    def adapter_path(self) -> str | Callable[..., Any]:
        """The class of the adapter, or its import path."""
        if self.adapter is not None and self.adapter != RAY_ADAPTER:
            return self.adapter
        for kind, path in _ADAPTERS.items():
            if isinstance(self.adapter_config, kind):
                return path
        raise ValueError(
            f"adapter_config is of type {type(self.adapter_config).__name__}; give an InstanceAdapterConfig, "
            "SQLiteAdapterConfig, RedisAdapterConfig or CeleryAdapterConfig, or name your own class as "
            "adapter"
        )

    def rules(self) -> RetryRules:
        """Return the rules of the tasks' states."""
        options: DurableOptions = self.adapter_config
        return options.rules(2**31 if self.max_retries is None else self.max_retries)


class TaskResult(BaseModel):
    """The status and the result of a task.

    Attributes
    ----------
    status : str
        ``PENDING``, ``STARTED``, ``RETRY``, ``SUCCESS``, ``FAILURE``, ``REVOKED`` (cancelled) or ``REJECTED``
        (no handler can run it).
    created_at : float
        Seconds since the epoch.
    result : object
        The handler's result; with ``FAILURE`` and ``REJECTED``, the error as text.
    attempts : int
        Number of runs.
    progress : object
        The value that the handler reported last, while it runs.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    id: str
    status: str
    created_at: float | None = None
    result: Any = None
    attempts: int = 0
    progress: Any = None
    #: The traceback of its last failure.
    traceback: str = ""
    #: False if the id was known before it was submitted.
    is_new: bool = True
