"""A user program that can reach only the scheduler, and runs a test's commands.

`Caller` is the test's side; the functions in `COMMANDS` run in the program. The program's connections to
any other address are refused before they are made, as by a firewall.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import numpy as np
from dask_processes import PATIENCE_S, Program
from distributed import Client

import daskserve as serve
from daskserve.common.types import Envelope, EnvelopeKind, Message
from daskserve.data.caller.calls.handle import routers_of
from daskserve.errors import ActorLostError

MIB = 1 << 20


class Caller:
    """The test's side."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._asked = 0

    def ask(self, command: str, *arguments: Any, timeout_s: float = PATIENCE_S) -> Any:
        """Run a command in the program and return its result."""
        return self.answer(self.begin(command, *arguments), timeout_s)

    def begin(self, command: str, *arguments: Any) -> int:
        """Start a command in the program and return its number; `answer` returns its result."""
        self._asked += 1
        self.program.write_line(json.dumps([self._asked, command, arguments]))
        return self._asked

    def answer(self, number: int, timeout_s: float = PATIENCE_S) -> Any:
        return json.loads(self.program.wait_for_line(f"answer {number} ", timeout_s))


@contextmanager
def cut_off_caller(address: str, folder: Path, *, security: Any = None) -> Iterator[Caller]:
    """Run a program that starts an instance on a free port."""
    (folder / "security.pickle").write_bytes(pickle.dumps(security))
    program = Program(["-c", "import cut_off; cut_off.main()", address], folder, keeps_stdin=True)
    try:
        yield Caller(program)
        assert program.process.stdin is not None
        program.process.stdin.close()
        assert program.wait() == 0, program.report()
    finally:
        program.kill()


# ---- in the program


class State:
    def __init__(self, dask_client: Client, refused: list[str]) -> None:
        self.refused = refused
        self.dask = dask_client
        self.client = serve.start(dask_client=dask_client, http_options={"port": 0})
        self.kept: Any = None


class Model:
    """The class that the program deploys."""

    def __init__(self) -> None:
        self.cancelled = 0
        self.waiting = 0

    async def __call__(self, array: Any) -> Any:
        return array + 1

    async def wait(self) -> None:
        self.waiting += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def counts(self) -> list[int]:
        return [self.waiting, self.cancelled]

    async def items(self, count: int) -> AsyncIterator[int]:
        for number in range(count):
            yield number


async def endless(scope: Any, receive: Any, send: Any) -> None:
    """Answer with an endless body."""
    if scope["type"] != "http":
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while True:
        await send({"type": "http.response.body", "body": bytes(64 * 1024), "more_body": True})


def deploy(state: State, name: str, workers: list[str] | None, num_replicas: int) -> list[str]:
    state.client.deploy(
        name,
        Model,
        config={"num_replicas": num_replicas, "max_concurrent_queries": 100},
        actor_options={"workers": workers},
    )
    return [str(each.state) for each in state.client.status().replicas(name)]


def call(state: State, name: str, value: int) -> Any:
    return state.client.get_handle(name).remote(value).result(20)


def ask_model(state: State, name: str, method: str) -> Any:
    return state.client.get_handle(name).options(method_name=method).remote().result(20)


def items(state: State, name: str, count: int) -> list[int]:
    return list(state.client.get_handle(name).options(method_name="items", stream=True).remote(count))


def refused(state: State) -> list[str]:
    return state.refused


def arrays(state: State, name: str, size_mib: int, count: int) -> int:
    """Send arrays concurrently and return how many answers are correct."""
    array = np.arange(size_mib * MIB // 8)
    handle = state.client.get_handle(name)
    responses = [handle.remote(array) for _ in range(count)]
    return sum(bool((response.result(60) == array + 1).all()) for response in responses)


def begin_waiting(state: State, name: str) -> None:
    state.kept = state.client.get_handle(name).options(method_name="wait").remote()


def cancel_waiting(state: State) -> None:
    state.kept.cancel()


def outcome(state: State) -> Any:
    try:
        return state.kept.result(20)
    except (ActorLostError, CancelledError) as error:
        return [type(error).__name__, getattr(error, "begun", None), str(error)]


def read_some(state: State, name: str, size_mib: int) -> int:
    """Read a number of bytes of an endless answer, then cancel the request."""
    # This code never notices that its client has left, so the end of the instance must not wait for it.
    state.client.create_backend(name, endless, config={"experimental_graceful_shutdown_timeout_s": 0.1})
    state.client.create_endpoint(name, backend=name)
    connection = state.client._connection.cluster_connection

    async def read() -> int:
        count, is_enough = 0, asyncio.Event()

        async def send(message: Message) -> None:
            nonlocal count
            count += len(message.get("body", b""))
            if count >= size_mib * MIB:
                is_enough.set()
                await asyncio.Event().wait()

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        routers = await routers_of(connection.cluster(state.client.instance_name))
        scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b""}
        request = asyncio.ensure_future(
            routers.router(name).send(Envelope(EnvelopeKind.HTTP, scope), receive, send)
        )
        await asyncio.wait_for(is_enough.wait(), 20)
        request.cancel()
        return count

    return connection.sync(read())


def close(state: State) -> None:
    state.dask.close()


COMMANDS: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (
        deploy,
        items,
        call,
        ask_model,
        refused,
        arrays,
        begin_waiting,
        cancel_waiting,
        outcome,
        read_some,
        close,
    )
}


def main() -> None:
    (address,) = sys.argv[1:]
    port = int(address.rpartition(":")[2])
    refusals: list[str] = []

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        # The event loop's own socket pairs have no port.
        if event == "socket.connect" and isinstance(arguments[1], tuple) and arguments[1][1] != port:
            refusals.append(f"{arguments[1]}")
            raise ConnectionRefusedError("cut off")

    sys.addaudithook(refuse)
    security = pickle.loads(Path("security.pickle").read_bytes())
    with dask.config.set({"distributed.comm.timeouts.connect": "5s"}):
        dask_client = Client(address, set_as_default=False, security=security)
    state = State(dask_client, refusals)
    for line in sys.stdin:
        number, command, arguments = json.loads(line)
        sys.stdout.write(f"answer {number} {json.dumps(COMMANDS[command](state, *arguments))}\n")
        sys.stdout.flush()
    if dask_client.status == "running":
        state.client.shutdown()
        dask_client.close()
