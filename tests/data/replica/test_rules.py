"""The threads and event loops in which user code runs, and the messages of its errors about them."""

from __future__ import annotations

import asyncio
import logging
import logging.config
import signal
import sqlite3
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tables import case

import daskserve as serve
from daskserve.testing import local_instance

pytestmark = pytest.mark.smoke

DEADLINE_S = 10
OTHER_LOGGER = logging.getLogger("other")


@pytest.fixture(scope="module")
def client() -> Iterator[serve.Client]:
    with local_instance() as client:
        yield client


def deploy(client: serve.Client, definition: Any, **config: Any) -> Any:
    config = {"max_concurrent_queries": 4, **config}
    client.deploy("b", definition, config=config, route_prefix=None)
    return client.get_handle("b")


class RunsLoopOfItsOwn:
    def __init__(self) -> None:
        coroutine = asyncio.sleep(0)
        try:
            asyncio.run(coroutine)
        finally:
            coroutine.close()

    async def __call__(self, request: Any = None) -> None: ...


class NeedsLoop:
    """Needs a running loop, like classes that open an HTTP session in their constructor."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()

    def __call__(self, request: Any = None) -> None: ...


class NeedsWorkersLoop(NeedsLoop):
    async def __call__(self, request: Any = None) -> None: ...


class AsksForLoop:
    def __init__(self) -> None:
        asyncio.get_event_loop()

    def __call__(self, request: Any = None) -> None: ...


class HandlesSignals:
    def __init__(self) -> None:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)

    def __call__(self, request: Any = None) -> None: ...


def test_a_failed_constructor_names_the_rule(client: serve.Client) -> None:
    for definition, config, note in [
        (RunsLoopOfItsOwn, {}, "Write `async def __init__` and `await` the coroutine"),
        (NeedsLoop, {}, "run without an event loop. Write `async def __init__`"),
        (NeedsWorkersLoop, {"event_loop": "worker"}, "run without an event loop. Write `async def __init__`"),
        (AsksForLoop, {}, "run without an event loop. Write `async def __init__`"),
        (HandlesSignals, {}, "Deploy with isolation='process'"),
    ]:
        with case(definition, config, note):
            with pytest.raises(serve.errors.DeployError) as caught:
                deploy(client, definition, **config)
            assert note in str(caught.value)
            assert '"Threads and event loops" in docs/deployments.md' in str(caught.value)


class Notes:
    """Keeps an SQLite connection, and records the threads in which it runs."""

    def __init__(self) -> None:
        self.database = sqlite3.connect(":memory:")
        self.database.execute("create table notes (text)")
        self.threads = {threading.get_ident()}

    def read(self) -> list[Any]:
        self.threads.add(threading.get_ident())
        return self.database.execute("select * from notes").fetchall()

    async def read_async(self) -> list[Any]:
        return self.read()

    def loop(self) -> list[Any]:
        self.read()
        asyncio.run(asyncio.sleep(0))
        return sorted(self.threads)

    async def foreign(self) -> None:
        async def make() -> Any:
            return asyncio.get_running_loop().create_future()

        await (await asyncio.to_thread(asyncio.run, make()))

    def __call__(self, request: Any = None) -> Any:
        return self.read()

    async def __del__(self) -> None:
        self.database.close()


class CheckedNotes(Notes):
    def reconfigure(self, config: Any) -> None:
        self.read()

    def check_health(self) -> None:
        self.read()

    def record_replica_metadata(self) -> dict[str, Any]:
        return {"notes": self.read()}

    def __del__(self) -> None:  # type: ignore[override]
        self.read()
        self.database.close()


def test_a_method_in_another_thread_or_on_another_loop_names_the_rule(client: serve.Client) -> None:
    notes = deploy(client, Notes)
    with pytest.raises(sqlite3.ProgrammingError) as caught:
        notes.read.remote().result(DEADLINE_S)
    (note,) = [each for each in caught.value.__notes__ if "run_sync_in_threadpool=False" in each]
    assert "check_same_thread=False" in note
    assert notes.read_async.remote().result(DEADLINE_S) == []
    with pytest.raises(RuntimeError, match="attached to a different loop") as foreign:
        notes.foreign.remote().result(DEADLINE_S)
    assert any("created on a different event loop" in each for each in foreign.value.__notes__)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_all_code_of_a_replica_may_share_one_thread(
    isolation: str, client: serve.Client, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"isolation": isolation, "run_sync_in_threadpool": False, "user_config": {}}
    notes = deploy(client, CheckedNotes, **options)
    answers = [getattr(notes, name).remote() for name in ("read", "read_async") * 4]
    assert [each.result(DEADLINE_S) for each in answers] == [[]] * 8
    assert notes.remote().result(DEADLINE_S) == []
    (only,) = notes.loop.remote().result(DEADLINE_S)
    assert (only == threading.main_thread().ident) <= (isolation == "process")
    client.delete_deployment("b")
    assert "destructor" not in caplog.text


def test_plain_methods_may_not_block_the_workers_loop() -> None:
    with pytest.raises(ValueError, match="cannot be combined with event_loop='worker'"):
        serve.config.BackendConfig(run_sync_in_threadpool=False, event_loop="worker")


class ConfiguresLogging:
    def __init__(self) -> None:
        logging.config.dictConfig({"version": 1, "disable_existing_loggers": True})

    def __call__(self, request: Any = None) -> None: ...

    def fail(self) -> None:
        raise ZeroDivisionError("logged all the same")


@pytest.fixture
def loggers() -> Iterator[None]:
    """Enable loggers again that a test has disabled."""
    known = [each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    before = {each: each.disabled for each in known}
    handlers = dict(logging._handlers), list(logging._handlerList)  # type: ignore[attr-defined]
    yield
    logging._handlers.update(handlers[0])  # type: ignore[attr-defined]
    logging._handlerList[:] = handlers[1]  # type: ignore[attr-defined]
    for each, is_disabled in before.items():
        each.disabled = is_disabled


@pytest.mark.usefixtures("loggers")
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_user_code_that_configures_logging_does_not_silence_failures(
    isolation: str,
    client: serve.Client,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    failing = deploy(client, ConfiguresLogging, isolation=isolation)
    with pytest.raises(ZeroDivisionError):
        failing.fail.remote().result(DEADLINE_S)
    client.delete_deployment("b")
    assert OTHER_LOGGER.disabled == (isolation == "thread")
    found = caplog.text if isolation == "thread" else capfd.readouterr().err
    assert "ZeroDivisionError: logged all the same" in found
