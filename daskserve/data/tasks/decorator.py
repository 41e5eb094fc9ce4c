"""``task_consumer`` and ``task_handler``, which make the replicas of a class consume a queue of tasks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from daskserve.data.tasks.config import TaskProcessorConfig
from daskserve.data.tasks.marks import CONSUMER, HANDLER

ClassT = TypeVar("ClassT", bound=type[Any])
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


@dataclass(frozen=True)
class ConsumerSpec:
    """The queue that a class consumes, and the methods that run its tasks, by the tasks' names."""

    config: TaskProcessorConfig
    handlers: Mapping[str, str]


def task_consumer(*, task_processor_config: TaskProcessorConfig) -> Callable[[ClassT], ClassT]:
    """Let the replicas of a class run the tasks of a queue.

    Each replica runs up to ``max_ongoing_requests`` tasks and requests at a time. Submitted tasks survive
    failures of replicas, workers and the scheduler; see the page Tasks of the documentation.

    Parameters
    ----------
    task_processor_config : TaskProcessorConfig
        The queue. Programs submit tasks with `instantiate_adapter_from_config`.

    Examples
    --------
    >>> @serve.deployment(max_ongoing_requests=5)
    ... @serve.tasks.task_consumer(task_processor_config=serve.tasks.TaskProcessorConfig(queue_name="mail"))
    ... class Mail:
    ...     @serve.tasks.task_handler
    ...     def send(self, address: str) -> str:
    ...         return f"sent to {address}"
    """
    if not isinstance(task_processor_config, TaskProcessorConfig):
        raise TypeError(
            f"task_processor_config is of type {type(task_processor_config).__name__}; give a "
            "TaskProcessorConfig"
        )
    _ = task_processor_config.adapter_path  # raises an error about the adapter here, and not in the replica

    def decorate(cls: ClassT) -> ClassT:
        if not inspect.isclass(cls):
            raise TypeError(f"task_consumer is for classes, got {cls!r:.100}; put it below @serve.deployment")
        handlers: dict[str, str] = {}
        for method, function in inspect.getmembers(cls, callable):
            name = getattr(function, HANDLER, None)
            if name is None:
                continue
            if method.startswith("_"):
                raise ValueError(
                    f"{cls.__name__}.{method} is a task handler with a private name; give it a public one"
                )
            if name in handlers:
                raise ValueError(
                    f"{cls.__name__} has two handlers for tasks {name!r}: {handlers[name]} and {method}"
                )
            handlers[name] = method
        if not handlers:
            raise ValueError(
                f"{cls.__name__} has no handlers; mark its methods with @serve.tasks.task_handler"
            )
        unknown = {each.task for each in task_processor_config.schedules.values()} - set(handlers)
        if unknown:
            raise ValueError(
                f"{cls.__name__} has no handler for the schedules of {', '.join(sorted(unknown))}"
            )
        setattr(cls, CONSUMER, ConsumerSpec(task_processor_config, handlers))
        return cls

    return decorate


@overload
def task_handler(_func: FunctionT, /) -> FunctionT: ...


@overload
def task_handler(_func: None = None, /, *, name: str | None = None) -> Callable[[FunctionT], FunctionT]: ...


def task_handler(_func: Any = None, /, *, name: str | None = None) -> Any:
    """Mark a plain method or a coroutine function of a `task_consumer` as a handler of tasks.

    Parameters
    ----------
    name : str, optional
        The name of the tasks. Default: the name of the method.
    """
    if name is not None and (not isinstance(name, str) or not name.strip()):
        raise ValueError(f"name is {name!r}; give the name of the tasks, or leave it out")

    def decorate(function: FunctionT) -> FunctionT:
        if not inspect.isfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"task_handler is for methods that return one value, got {function!r:.100}")
        setattr(function, HANDLER, name or function.__name__)
        return function

    return decorate if _func is None else decorate(_func)
