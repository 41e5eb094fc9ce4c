"""The queues of tasks, as programs reach them."""

from __future__ import annotations

from functools import partial

from daskserve.client.client import Client, ClientVerbs
from daskserve.client.functions.discovery import find_default, named_instance
from daskserve.client.functions.forms import Form, blocking
from daskserve.client.instance.connection import InstanceConnection
from daskserve.data.tasks.adapter import TaskProcessorAdapter, made_adapter
from daskserve.data.tasks.config import TaskProcessorConfig
from daskserve.data.tasks.durable import DurableAdapter
from daskserve.data.tasks.queues.instance import InstanceQueue
from daskserve.errors import NotRunningError


def instantiate_adapter_from_config(
    task_processor_config: TaskProcessorConfig, *, client: ClientVerbs | Client | None = None
) -> TaskProcessorAdapter:
    """Return the adapter of a queue, connected, with which any program submits tasks.

    Parameters
    ----------
    task_processor_config : TaskProcessorConfig
        The config of the consumer.
    client : Client, optional
        The client of the instance that keeps the queue, for a queue of the instance. Default: the instance in
        which the code runs, or otherwise the one that `run` or `connect` would use.

    Raises
    ------
    ValueError
        The import path of the adapter cannot be imported.
    TypeError
        The adapter is not a `TaskProcessorAdapter`.
    NotRunningError
        The queue is that of an instance, and none runs.
    TaskQueueError
        The queue cannot be reached.

    Examples
    --------
    >>> config = TaskProcessorConfig(queue_name="mail")  # doctest: +SKIP
    >>> adapter = serve.tasks.instantiate_adapter_from_config(config)  # doctest: +SKIP
    >>> adapter.enqueue_task_sync("send", args=["Ann"], id="mail-1").status  # doctest: +SKIP
    'PENDING'
    """
    adapter = made_adapter(task_processor_config)
    if isinstance(adapter, DurableAdapter) and isinstance(adapter.queue, InstanceQueue):
        found = find_instance() if client is None else client._connection
        adapter.queue.join(found.cluster_connection, found.instance)
    adapter.initialize()
    return adapter


async def _find_instance(form: Form[Client]) -> InstanceConnection:
    found = await find_default(form, joins=True, choose=partial(named_instance, name=None))
    if found is None:
        raise NotRunningError(
            "The queue is stored in an instance, but this process is not connected to one. Connect with "
            "serve.connect(), or store the queue elsewhere with "
            "adapter_config=serve.tasks.RedisAdapterConfig(...)."
        )
    return found


find_instance = blocking(_find_instance)
