"""The thread that calls the handlers of ``logging``: their records, and that logging never waits."""

from __future__ import annotations

import atexit
import contextvars
import logging
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest

from daskserve.cluster.worker import log_thread
from daskserve.cluster.worker.host import is_own_process
from daskserve.cluster.worker.log_thread import LogThread
from daskserve.cluster.worker.tagging import mark_output
from daskserve.context import ReplicaContext, RequestContext, current_replica, current_request
from daskserve.telemetry.logs.records import Tags

DEADLINE_S = 10.0
CALL_HANDLERS = logging.Logger.callHandlers

color: contextvars.ContextVar[str] = contextvars.ContextVar("color", default="none")


class Held(logging.Handler):
    """Keeps the records that it receives; waits with each record while `gate` is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.has_begun = threading.Event()
        self.records: list[logging.LogRecord] = []
        self.seen: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.has_begun.set()
        assert self.gate.wait(DEADLINE_S)
        self.records.append(record)
        self.seen.append((threading.current_thread().name, color.get()))

    @property
    def messages(self) -> list[str]:
        return [record.getMessage() for record in self.records]


@pytest.fixture
def held() -> Held:
    return Held()


@pytest.fixture
def log(held: Held) -> Iterator[logging.Logger]:
    """A logger that does not propagate, with one handler."""
    log = logging.getLogger("daskserve.tests.log_thread")
    log.propagate = False
    log.addHandler(held)
    yield log
    log.propagate = True
    log.handlers.clear()


@contextmanager
def opened(**limits: int) -> Iterator[LogThread]:
    thread = LogThread(**limits)
    thread.open()
    try:
        yield thread
    finally:
        thread.close()
        assert logging.Logger.callHandlers is CALL_HANDLERS


def raised(text: str) -> ValueError:
    try:
        raise ValueError(text)
    except ValueError as error:
        return error


def test_code_that_logs_does_not_wait_for_a_handler(log: logging.Logger, held: Held) -> None:
    held.gate.clear()
    with opened():
        for number in range(5):
            log.warning("number %d", number)
        assert held.records == []
        held.gate.set()
    assert held.messages == [f"number {number}" for number in range(5)]
    assert {name for name, _ in held.seen} == {"daskserve-logging"}


def test_handlers_receive_the_exception_and_the_context_of_the_code_that_logged(
    log: logging.Logger, held: Held
) -> None:
    error = raised("why")
    with opened():
        color.set("green")
        log.error("failed", exc_info=error, extra={"shoe": 43})
        color.set("none")
    (record,) = held.records
    assert record.exc_info is not None
    assert record.exc_info[1] is error
    assert (record.thread, record.__dict__["shoe"]) == (threading.get_ident(), 43)
    assert held.seen == [("daskserve-logging", "green")]


def test_the_message_is_that_of_the_moment_of_logging(log: logging.Logger, held: Held) -> None:
    held.gate.clear()
    values = [1]
    with opened():
        log.warning("values %s", values)
        log.warning("%s of %d", "one", 2)
        log.warning(values)
        log.warning("%s of caf\udce9", "\ud800")
        values.append(2)
        held.gate.set()
    assert held.messages == ["values [1]", "one of 2", "[1]", "\\ud800 of caf\\udce9"]
    assert held.records[1].args == ("one", 2), "some formatters read plain arguments"


def test_a_message_that_does_not_fit_its_arguments_is_reported_by_the_handler(
    log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    log.addHandler(logging.StreamHandler())
    log.removeHandler(log.handlers[0])
    with opened():
        log.warning("%d of %d", object())
    assert "TypeError: %d format" in capsys.readouterr().err


def test_levels_filters_and_later_handlers_apply_as_always(log: logging.Logger, held: Held) -> None:
    log.removeHandler(held)
    with opened():
        log.addHandler(held)
        held.setLevel(logging.ERROR)
        log.warning("below the level of the handler")
        log.debug("below the level of the logger")
        log.error("above")
    assert held.messages == ["above"]


def test_basic_config_adds_its_handlers(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    with opened():
        logging.basicConfig(handlers=[held])
        logging.getLogger("daskserve.tests.any").error("arrives")
    assert held.messages == ["arrives"]


def test_an_error_of_a_handler_ends_neither_the_thread_nor_the_code_that_logs(
    log: logging.Logger, held: Held, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(record: logging.LogRecord) -> bool:
        if "bad" in record.msg:
            raise KeyError(record.msg)
        return True

    held.addFilter(refuse)
    with opened():
        log.warning("bad")
        log.warning("good")
    assert held.messages == ["good"]
    assert "KeyError: 'bad'" in capsys.readouterr().err


def test_records_beyond_the_limit_are_dropped_and_counted(
    log: logging.Logger, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = logging.getLogger("daskserve.logging")
    monkeypatch.setattr(own, "propagate", False)
    monkeypatch.setattr(own, "handlers", [held])
    held.gate.clear()
    with opened(max_records=3):
        log.warning("first")
        assert held.has_begun.wait(DEADLINE_S)
        for number in range(10):
            log.warning("number %d", number)
        held.gate.set()
    assert held.messages == [
        "first",
        *("number 0", "number 1", "number 2"),
        "Dropped 7 log records, because the logging handlers are too slow",
    ]


def test_only_some_queued_records_keep_the_frames_of_their_exception(log: logging.Logger, held: Held) -> None:
    held.gate.clear()
    with opened(max_tracebacks=2):
        for number in range(4):
            log.error("number %d", number, exc_info=raised(f"error {number}"))
        held.gate.set()
        log.error("later", exc_info=raised("error"))
    assert [bool(record.exc_info) for record in held.records[:4]] == [True, True, False, False]
    formatted = logging.Formatter().format(held.records[3])
    assert "in raised" in formatted
    assert formatted.endswith("ValueError: error 3")


def test_a_handler_that_logs_does_not_feed_the_queue(log: logging.Logger, held: Held) -> None:
    class Chatty(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.msg != "sent":
                log.info("sent")

    log.setLevel(logging.INFO)
    log.addHandler(Chatty())
    with opened(max_records=1):
        log.warning("record")
    assert held.messages == ["record", "sent"]


def test_a_fork_calls_its_handlers_itself(
    log: logging.Logger, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened():
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: -1)
            log.warning("in a fork")
            assert held.messages == ["in a fork"]
    assert held.seen == [(threading.current_thread().name, "none")]


def test_after_the_end_handlers_are_called_as_before(log: logging.Logger, held: Held) -> None:
    with opened() as thread:
        thread.open()
    thread.close()
    log.warning("here")
    assert held.seen == [(threading.current_thread().name, "none")]


def test_code_that_wrapped_the_handlers_stays_after_the_end(
    log: logging.Logger, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.Logger, "callHandlers", CALL_HANDLERS)  # and again at the end
    thread = LogThread()
    thread.open()
    inner: Any = logging.Logger.callHandlers
    seen = []

    def wrapper(source: logging.Logger, record: logging.LogRecord) -> None:
        seen.append(record.msg)
        inner(source, record)

    logging.Logger.callHandlers = wrapper  # type: ignore[method-assign, assignment]
    thread.close()
    log.warning("here")
    assert seen == held.messages == ["here"]


def test_a_handler_that_hangs_delays_the_end_of_the_process_only_briefly(
    log: logging.Logger, held: Held, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(log_thread, "FLUSH_S", 0.02)
    registered: list[Any] = []
    monkeypatch.setattr(atexit, "register", lambda *call: registered.append(call))
    held.gate.clear()
    with opened():
        log.warning("number 1")
        log.warning("number 2")
    ((function, thread),) = registered
    function(thread)
    assert "log records are lost" in capsys.readouterr().err
    held.gate.set()
    thread.join(DEADLINE_S)
    assert held.messages == ["number 1", "number 2"]


def test_code_logs_while_another_thread_imports_opentelemetry(
    held: Held, log: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Half imported: it is in the table of modules, but has no names yet.
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", ModuleType("opentelemetry.trace"))

    def answer() -> None:
        current_replica.set(ReplicaContext("i", "shop/Model", "shop/Model#abc"))
        current_request.set(RequestContext("r1", "/x"))
        log.warning("hello")

    with opened() as thread:
        contextvars.copy_context().run(answer)
        (row,) = (each for each in thread.logs.ring.rows() if each["message"] == "hello")
    assert (row["request_id"], row["trace_id"]) == ("r1", "")


def test_only_a_process_that_is_a_workers_own_is_changed() -> None:
    assert is_own_process(Mock(address="tcp://10.0.0.1:4000"))
    assert not is_own_process(Mock(address="inproc://10.0.0.1/1/2"))
    with ThreadPoolExecutor(1) as threads:  # the loop of LocalCluster(processes=False, protocol="tcp")
        assert not threads.submit(is_own_process, Mock(address="tcp://10.0.0.1:4000")).result()


def test_records_and_prints_have_their_replica_and_request(
    held: Held, log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    def say(text: str) -> None:
        sys.stdout.write(text)

    with opened() as thread:
        tags = Tags("shop", "Model", "shop/Model#abc", component="replica")
        thread.logs.configure("shop/Model#abc", tags, {})
        undo = mark_output(thread.logs, thread.take_print)
        say("of nobody\n")

        def answer() -> None:
            current_replica.set(ReplicaContext("i", "shop/Model", "shop/Model#abc"))
            current_request.set(RequestContext("r1", "/x"))
            log.warning("hello", extra={"route": "mine"})
            say("one\ntwo ")
            say("three\udce9\n")
            say("begun")
            sys.stdout.flush()
            say("no end")

        contextvars.copy_context().run(answer)
        # A thread of user code has no context, so its record belongs to the only replica.
        logging.getLogger("users").error("lost")
        thread.logs.forget("shop/Model#abc")
        undo()
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "of nobody"
    marked = [each for each in out if each.startswith("shop/Model#abc: ")]
    assert [each.partition(": ")[2] for each in marked] == ["one", "two three\\udce9", "begun", "no end"]
    rows = {each["message"]: each for each in thread.logs.ring.rows()}
    assert rows["hello"]["request_id"] == rows["two three\\udce9"]["request_id"] == "r1"
    assert rows["hello"]["route"] == "/x"
    assert rows["lost"]["replica"] == "shop/Model#abc"
    assert "of nobody" not in rows
