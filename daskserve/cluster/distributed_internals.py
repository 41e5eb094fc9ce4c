"""The undocumented parts of distributed that daskserve uses."""

from __future__ import annotations

import asyncio
import inspect
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, cast

from tornado.ioloop import IOLoop
from tornado.iostream import IOStream

from daskserve.errors import ActorLostError
from daskserve.internals.checking import needs
from daskserve.internals.python import detach_finalizers

with needs("distributed", ">=2025.1,<2026.9") as check:
    from distributed import Client, Scheduler, Security, Worker
    from distributed.batched import BatchedSend
    from distributed.broker import Broker, Topic
    from distributed.client import _current_client, _maybe_call_security_loader, _wait
    from distributed.comm import parse_address
    from distributed.comm.core import Comm
    from distributed.comm.registry import get_backend
    from distributed.comm.tcp import TCP
    from distributed.core import ConnectionPool, Server, Status
    from distributed.deploy import Cluster
    from distributed.diskutils import WorkDir
    from distributed.protocol import to_serialize
    from distributed.scheduler import WorkerState
    from distributed.utils import get_ip
    from distributed.utils_comm import gather_from_workers
    from distributed.worker import _worker_cvar
    from distributed.worker_state_machine import FreeKeysEvent
    from distributed.worker_state_machine import WorkerState as TaskStates

    check.fields(Client, "_asynchronous", "_handle_report_task", "_scheduler_identity", "preloads", "rpc")
    check.fields(Client, "scheduler", "status", "_loop_runner")
    check.attributes(Client, "_ensure_connected", "_reconnect", "_scatter", "_send_to_scheduler")
    check.fields(Cluster, "_loop_runner")
    check.attributes(WorkDir, "_finalize")
    check.attributes(Scheduler, "client_desires_keys", "get_task_status")
    check.fields(ConnectionPool, "occupied")
    check.fields(Server, "handlers", "rpc")
    check.fields(TaskStates, "actors")
    check.attributes(Worker, "actor_execute", "_instances", "_register_with_scheduler")
    check.fields(Worker, "batched_stream", "connection_args", "extensions", "periodic_callbacks", "state")
    check.constants(inspect.unwrap(Worker.handle_scheduler), "worker-handle-scheduler-connection-broken")
    check.constants(Worker.heartbeat, "worker-heartbeat-missing")
    check.constants(Worker.__init__, "worker-lifetime-reached")
    check.constants(inspect.unwrap(Scheduler.remove_worker), "scheduler-remove-worker")
    check.fields(Scheduler, "client_comms", "idle_timeout", "stream_comms", "_broker")
    check.fields(Broker, "_topics")
    check.fields(Topic, "subscribers")
    check.fields(WorkerState, "actors")
    check.attributes(Scheduler, "adaptive_target", "retire_workers", "workers_to_close")
    check.attributes(Status, "closing_gracefully", "dont_reply", "running")
    check.fields(Comm, "local_info", "remote_info", "handshake_options")
    check.attributes(Comm, "handshake_info", "handshake_configuration")
    check.fields(TCP, "stream")

with needs("dask", ">=2025.1,<2026.9") as check:
    import dask.config

    #: The variable from which a new process reads the configuration of its parent.
    _INHERITED_CONFIG = "DASK_INTERNAL_INHERIT_CONFIG"
    check.constants(dask.config.collect_env, _INHERITED_CONFIG)

#: Also used by other modules of `daskserve.cluster`.
__all__ = ["gather_from_workers", "get_ip", "to_serialize"]

#: Why a worker closes: its connection to the scheduler broke, the scheduler does not know the worker, or the
#: scheduler has removed the worker and tells it to close.
STREAM_BROKE = "worker-handle-scheduler-connection-broken"
IS_UNKNOWN = "worker-heartbeat-missing"
IS_REMOVED = "scheduler-remove-worker"
#: Why a worker closes that has asked the scheduler to retire it.
RETIRES_ITSELF = ("worker-close-gracefully", "worker-lifetime-reached")

#: Interval at which to check whether a client has connected again.
_CONNECTING_S = 0.05

#: Fields of the handshake from which both ends of a connection choose an encoding.
_HANDSHAKE_FIELDS = ("compression", "python", "pickle-protocol")

# ---- clients and workers


def configured_security(address: str) -> Security:
    """Return the security that `distributed.Client` uses by default for an address."""
    return _maybe_call_security_loader(address) or Security()


def scheduler_address(client: Client) -> str | None:
    """Return the address of the scheduler that a client is connected to; None if the client is closed."""
    return None if client.scheduler is None else str(client.scheduler.address)


def is_asynchronous(client: Client) -> bool:
    """Return whether a client was created with ``asynchronous=True``, so that it runs on its user's loop."""
    # The public property `asynchronous` is True on the loop of any client.
    return bool(client._asynchronous)


def leave_folders() -> None:
    """In a forked process: leave Dask's temporary folders to the parent, whose servers use them."""
    detach_finalizers(WorkDir._finalize)


async def close_client(client: Client, **options: Any) -> None:
    """Close an asynchronous client, and release its event loop; the options are those of its ``close``."""
    await client.close(**options)
    release_loop(client)


def release_loop(closed: Client | Cluster) -> None:
    """Release the event loop of a closed client or cluster; idempotent.

    Dask counts the clients and clusters that use a loop of its own, and ends the loop's thread with the last
    one. Its clients count themselves when they start. They do not do so when they close, if they are
    asynchronous, or after ``shutdown``.
    """
    # A thread cannot wait for its own end, so if the last user is on the loop itself, it only requests the
    # end of the loop.
    with suppress(RuntimeError):
        closed._loop_runner.stop()


async def call_scheduler(client: Client, operation: str, **arguments: Any) -> Any:
    """Call a handler of the scheduler; returns None if it has no such handler.

    Raises
    ------
    OSError
        The client is closed, or the scheduler cannot be reached.
    """
    await until_connected(client)
    return await getattr(client.scheduler, operation)(**arguments)


async def until_connected(client: Client) -> None:
    """Return once a client is connected or connected again; raise `OSError` if it is closed."""
    # Dask keeps trying to reach a dead scheduler even after another one has replaced it.
    while client.status in ("newly-created", "connecting"):  # noqa: ASYNC110 - Dask has no event
        await asyncio.sleep(_CONNECTING_S)
    if client.scheduler is None:
        raise OSError("the Dask client is closed")


def desire_keys(client: Client, keys: list[Any]) -> None:
    """Subscribe a client to tasks of other clients; the scheduler keeps their results for it.

    The subscription ends when the client has no futures of these keys any more.
    """
    client._send_to_scheduler({"op": "client-desires-keys", "keys": keys, "client": client.id})


def call_when_closed(client: Client, callback: Callable[[], None]) -> None:
    """Call a function on the client's event loop once the client is closed."""

    async def follow() -> None:
        with suppress(Exception):  # code that uses the client gets the reason why it could not connect
            await client
        # This task listens to the scheduler. It ends when the client is closed, and only then.
        listening = client._handle_report_task or asyncio.ensure_future(asyncio.sleep(0))
        listening.add_done_callback(lambda _: callback())

    cast(IOLoop, client.loop).add_callback(follow)


class _BeforeClose:
    """Replaces a client's preload scripts, which are the first to end when the client closes."""

    def __init__(self, preloads: Any, function: Callable[[], Awaitable[None]]) -> None:
        self.start = preloads.start
        self._preloads = preloads
        self._function = function

    async def teardown(self) -> None:
        await self._function()
        await self._preloads.teardown()


def call_before_close(client: Client, function: Callable[[], Awaitable[None]]) -> None:
    """Await a function when the client is about to close, on its event loop; it must not raise.

    The client's connections are still open, and so is the cluster that closes with the client.
    """
    client.preloads = _BeforeClose(client.preloads, function)  # type: ignore[assignment]


async def call_actor(client: Client, worker: str, key: str, function: str, *arguments: Any) -> Any:
    """Call a method of the actor with a key, even if another client created it; raise the method's error.

    Raises
    ------
    ActorLostError
        The worker cannot be reached, or has no actor with this key.
    """
    try:
        answer = await client.rpc(worker).actor_execute(
            actor=key, function=function, args=[to_serialize(each) for each in arguments], kwargs={}
        )
    except OSError as error:
        raise ActorLostError(f"Worker {worker} is gone: {error}") from error
    except KeyError as error:
        raise ActorLostError(f"Worker {worker} has no actor {key}.", begun=False) from error
    if answer["status"] != "OK":
        raise answer["exception"]
    return answer["result"]


def connect_again_when(
    client: Client, is_back: Callable[[], Awaitable[None]], connected: Callable[[], None]
) -> None:
    """Make a client that has lost its scheduler wait for a function before it connects again.

    Dask's own attempts have growing pauses, and end after 30 seconds.

    Parameters
    ----------
    is_back
        Returns when the client should connect; raises `OSError` to give up.
    connected
        Called each time the client has connected again.
    """
    original = client._ensure_connected

    async def ensure_connected(timeout: float | None = None) -> None:
        is_first = not client._scheduler_identity
        if not is_first:
            await is_back()
        await original(timeout)
        if not is_first and client.status == "running":
            connected()

    client._ensure_connected = ensure_connected  # type: ignore[method-assign]
    # Dask logs every error that ends this method, even if the error only says that the client was closed.
    client._reconnect = partial(inspect.unwrap(Client._reconnect), client)  # type: ignore[method-assign]


def scheduler_id(client: Client) -> str | None:
    """Return the id of the scheduler process that a client was last connected to."""
    found = client._scheduler_identity.get("id")
    return None if found is None else str(found)


def is_present(worker: Worker) -> bool:
    """Return whether a worker is neither closing nor closed."""
    return worker.status in (Status.running, Status.paused)


def is_retiring(worker: Worker) -> bool:
    """Return whether the scheduler retires a worker, which is still open."""
    return bool(worker.status is Status.closing_gracefully)


def pause_heartbeat(worker: Worker) -> None:
    """Stop a worker's heartbeats until it is registered again."""
    worker.periodic_callbacks["heartbeat"].stop()


def is_calling_scheduler(worker: Worker) -> bool:
    """Return whether a worker waits for an answer of its scheduler."""
    return bool(worker.rpc.occupied.get(worker.scheduler.address))


def forget_tasks(worker: Worker) -> bool:
    """Make a worker forget all tasks, actors and data; return False if a running task prevents this."""
    keys = list(worker.state.tasks)
    worker.handle_stimulus(FreeKeysEvent(keys=keys, stimulus_id="daskserve-lost-scheduler"))
    return not worker.state.tasks and not worker.data


async def register_again(worker: Worker) -> None:
    """Register a worker that has no tasks with the scheduler that is at the address of the lost one."""
    worker.batched_stream = BatchedSend(interval="2ms", loop=worker.loop)
    await worker._register_with_scheduler()
    for extension in worker.extensions.values():
        # The registration has started a measurement that the first heartbeat must not count.
        if hasattr(extension, "heartbeat"):
            extension.heartbeat()


def connection_args(worker: Worker) -> dict[str, Any]:
    """Return the arguments with which a worker connects to other processes."""
    return dict(worker.connection_args)


def actors_on(worker: Worker) -> list[Any]:
    """Return the actors that live on the worker of this process."""
    return list(worker.state.actors.values())


@contextmanager
def as_current(worker: Any, client: Any) -> Iterator[None]:
    """Set the results of `distributed.get_worker` and `default_client`, in this context and its copies."""
    token, client_token = _worker_cvar.set(worker), _current_client.set(client)
    try:
        yield
    finally:
        _current_client.reset(client_token)
        _worker_cvar.reset(token)


class ScatteringClient(Client):
    """A client that scatters values to workers over their connections."""

    async def _scatter(self, *args: Any, local_worker: Any = None, **kwargs: Any) -> Any:
        # The current worker's state belongs to another thread, or the worker is another process.
        return await super()._scatter(*args, **kwargs)


def is_wait_for_futures(function: Any) -> bool:
    """Return whether a function is the one that `distributed.wait` runs on the default client's loop."""
    return function is _wait


def config_variables(sections: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables that give sections of Dask's configuration to a new process."""
    return {_INHERITED_CONFIG: dask.config.serialize(sections)}


# ---- servers: workers and the scheduler

#: The return value of a handler that has taken over its caller's connection.
NO_REPLY = Status.dont_reply


def is_running(server: Server | WorkerState) -> bool:
    """Return whether a server, or the scheduler's state of a worker, is running: not paused or closing."""
    return bool(server.status is Status.running)


# ---- the scheduler


def replace_idle_timeout(scheduler: Scheduler, timeout_s: float | None) -> float | None:
    """Set the time after which an idle scheduler closes, None for never; return the previous value."""
    previous: float | None = scheduler.idle_timeout
    scheduler.idle_timeout = timeout_s
    return previous


def answer_signal(scheduler: Scheduler, leave: Callable[[], None]) -> None:
    """Call a function before a scheduler closes because of a signal, but not if a client closes it."""
    original = scheduler.close

    async def close(timeout: float | None = None, reason: str = "unknown") -> None:
        if reason.startswith("signal-") and is_running(scheduler):
            leave()
        await original(timeout, reason)

    scheduler.close = close  # type: ignore[method-assign]


def stop_answering_signal(scheduler: Scheduler) -> None:
    """Undo `answer_signal`; idempotent."""
    vars(scheduler).pop("close", None)


def break_stream(scheduler: Scheduler, worker: str) -> None:
    """Break the connection to a worker, so that the worker stays and treats the scheduler as lost."""
    stream = scheduler.stream_comms.get(worker)
    if stream is not None:
        stream.abort()


def topics_of(scheduler: Scheduler) -> list[str]:
    """Return the names of the topics that the scheduler keeps."""
    return list(scheduler._broker._topics)


def has_listeners(scheduler: Scheduler, topic: str) -> bool:
    """Return whether a connected client is subscribed to a topic; Dask keeps the ids of closed clients."""
    return any(client in scheduler.clients for client in scheduler._broker._topics[topic].subscribers)


def publish(scheduler: Scheduler, topic: str, message: Mapping[str, Any]) -> None:
    """Send plain values to the listeners of a topic, except those whose connection is closed."""
    # Dask keeps closed clients in case they connect again, and logs an error with a traceback for each.
    listeners = scheduler._broker._topics[topic].subscribers
    comms = scheduler.client_comms
    closed = {client for client in listeners if client in comms and comms[client].closed()}
    listeners -= closed
    try:
        scheduler.log_event(topic, dict(message))
    finally:
        listeners |= closed


def drop_topic(scheduler: Scheduler, topic: str) -> None:
    """Delete all events of a topic. Without this, the scheduler keeps them until it closes."""
    scheduler._broker._topics.pop(topic, None)


# ---- connections


async def connect_comm(
    address: str, *, handshake: Mapping[str, Any] | None = None, **connection_args: Any
) -> Comm:
    """Connect to an address in a single attempt, and exchange handshakes.

    Parameters
    ----------
    handshake
        Fields of `peer_handshake` to present instead of this process's own.
    """
    scheme, location = parse_address(address)
    comm: Comm = await get_backend(scheme).get_connector().connect(location, **connection_args)
    try:
        comm.local_info = {**comm.handshake_info(), **(handshake or {}), "address": comm.local_address}
        await comm.write(comm.local_info)
        comm.remote_info = {**await comm.read(), "address": comm.peer_address}
        agree(comm, comm.remote_info)
    except BaseException:
        comm.abort()
        raise
    return comm


def peer_handshake(comm: Comm) -> dict[str, Any]:
    """Return the fields of the peer's handshake."""
    return {name: comm.remote_info[name] for name in _HANDSHAKE_FIELDS if name in comm.remote_info}


def agree(comm: Comm, handshake: dict[str, Any]) -> None:
    """Choose an encoding for a connection that the process with the given handshake can decode."""
    comm.handshake_options = comm.handshake_configuration(comm.local_info, handshake)


def is_plain_tcp(comm: Any) -> bool:
    """Return whether a connection is plain TCP, so that its socket can be taken over."""
    return type(comm) is TCP


def stream_of(comm: Any) -> IOStream | None:
    """Return the byte stream of a connection over TCP, with TLS or without; None for any other."""
    return comm.stream if isinstance(comm, TCP) else None


def socket_of(comm: Any) -> socket.socket | None:
    """Return the socket of an open connection over TCP, with TLS or without; None for any other."""
    stream = stream_of(comm)
    return None if stream is None else stream.socket


def detach_socket(comm: Any) -> socket.socket:
    """Close a connection over plain TCP and return its socket, which stays open."""
    # A second descriptor of the same connection stays open when the comm closes its own.
    sock: socket.socket = comm.stream.socket.dup()
    comm.abort()
    return sock
