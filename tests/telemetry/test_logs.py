"""The logs of a process: settings, lines, files, and the last records in memory."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from tables import each_case

from daskserve.common.clock import time_of_day
from daskserve.options.logging import LoggingConfig, over
from daskserve.proxies.ingress.access import AccessLog
from daskserve.proxies.ingress.request import IngressRequest, PassedResponse
from daskserve.proxies.ingress.routes import Route, RouteTable
from daskserve.telemetry.logs import access as access_module
from daskserve.telemetry.logs.formats import access_json, access_text, json_of, line_of, text_of
from daskserve.telemetry.logs.process import ProcessLogs
from daskserve.telemetry.logs.records import MAX_TEXT, Access, AccessLine, Tags
from daskserve.telemetry.logs.ring import Query, Ring
from daskserve.telemetry.logs.settings import LogSettings, merged
from daskserve.telemetry.logs.sinks import RETRY_S, FileSink, StreamSink

REPLICA = Tags("shop", "Model", "shop/Model#abc", "r1", "", "/x", "replica")
PROXY = Tags(component="proxy")


class Lines:
    """A sink in memory."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.lost = 0

    def write(self, lines: Any) -> None:
        self.lines += lines

    def close(self) -> None:
        """Do nothing."""


def record(text: str = "x", *args: object, **attributes: Any) -> logging.LogRecord:
    made = logging.LogRecord("mine", logging.INFO, "file.py", 3, text, args, None)
    vars(made).update(attributes)
    return made


def access(**fields: Any) -> Access:
    values: dict[str, Any] = {"client": ("1.2.3.4", 5), "http_version": "1.1", **fields}
    return Access(0.0, values.pop("method", "GET"), values.pop("target", b"/a"), b"", 200, 0.0123, **values)


def test_a_field_that_is_not_set_is_as_in_what_is_larger() -> None:
    inner = LoggingConfig(log_level=10)
    whole = over(inner, LoggingConfig(encoding="json", log_level="ERROR"))  # type: ignore[arg-type]
    assert whole is not None
    assert whole.to_plain() == {"encoding": "JSON", "log_level": "DEBUG"}
    assert over(None, inner) is inner
    assert over(inner, None) is inner
    assert merged(None, None) is None
    found = merged({"encoding": "JSON", "logs_dir": "/l"}, None, {"encoding": "TEXT", "later": 1})
    assert found == LogSettings(encoding="TEXT", logs_dir="/l")
    assert not found.to_stdout
    assert LogSettings(log_level="NOTSET").level == 1


@each_case(
    ("wrong", "text"),
    [
        ({"log_level": "LOUD"}, "is not a level"),
        ({"log_level": "MINE"}, "'MINE' is not a level"),
        ({"log_level": 1.5}, "is not a level"),
        ({"encoding": "XML"}, "TEXT"),
        ({"additional_log_standard_attrs": ["nme"]}, "not an attribute of LogRecord"),
        ({"max_file_bytes": 1}, "4096"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_a_wrong_config_says_so(wrong: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(logging._nameToLevel, "MINE", 5)  # workers do not know this level
    with pytest.raises((ValidationError, ValueError), match=text):
        LoggingConfig(**wrong)


def test_a_record_is_one_json_object_whatever_it_holds() -> None:
    loop: list[Any] = []
    loop.append(loop)
    marked = record("%s is", 1, mine={"a": 1}, odd=loop, deployment="my own", key={(1, 2): math.inf})
    REPLICA.mark(marked)
    assert marked.__dict__["deployment"] == "my own"
    settings = LogSettings(additional_log_standard_attrs=("funcName", "name"))
    found = json.loads(json_of(marked, REPLICA, settings))
    assert found["message"] == "1 is"
    assert (found["request_id"], found["deployment"]) == ("r1", "my own")
    assert (found["mine"], found["key"]) == ({"a": 1}, {"(1, 2)": "inf"})
    assert found["name"] == "mine"
    assert found["component_name"] == "replica"
    assert found["replica"] == "shop/Model#abc"
    assert "\n" not in json_of(record("two\nlines"), REPLICA, settings)
    assert "TypeError in its arguments" in text_of(record("%d", "x"), PROXY, settings)


def test_a_client_cannot_write_lines_nor_control_a_terminal() -> None:
    found = access(target=b"/a\r\nINFO: me\x1b[2J\xff")
    assert access_text(found) == ('INFO:     1.2.3.4:5 - "GET /a\\r\\nINFO: me\\x1b[2J\\xff HTTP/1.1" 200 OK')
    whole = json.loads(access_json(found._replace(trace_id="t", request_id='"\n')))
    assert whole.items() >= {**found.facts(), "message": found.message, "logger": "daskserve.access"}.items()
    assert (whole["request_id"], whole["trace_id"]) == ('"\n', "t")
    assert "\n" not in access_json(found)
    plain = {**found.plain(), "message": "a\x1b[2Jb\rc"}
    assert line_of(plain).endswith("a\\x1b[2Jb\\x0dc")
    call = access(method="CALL", target=b"go", client=None, backend="shop/Model", replica="shop/Model#abc")
    assert access_text(call).endswith("shop/Model#abc  -- CALL go OK 12.3ms")


def test_a_file_begins_anew_and_keeps_some_old_ones(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.log"
    sink = FileSink(path, 100, 2, lambda: 0.0)
    for number in range(20):
        sink.write([f"line {number} {'x' * 30}"])
    sink.close()
    names = sorted(each.name for each in path.parent.iterdir())
    assert names == ["a.log", "a.log.1", "a.log.2"]
    assert all(each.stat().st_size <= 100 for each in path.parent.iterdir())
    assert "line 19" in path.read_text()
    again = FileSink(path, 100, 0, lambda: 0.0)
    again.write(["y" * 90])
    again.write(["z" * 90])
    again.close()
    assert path.read_text() == "z" * 90 + "\n"


def test_a_disk_that_is_full_loses_lines_and_is_tried_again(tmp_path: Path) -> None:
    now = [0.0]
    full = FileSink(Path("/dev/full"), 1 << 20, 0, lambda: now[0])
    full.write(["a", "b"])
    full.write(["c"])
    assert full.lost == 3
    assert "No space left" in full.problem
    full.path = tmp_path / "free.log"
    now[0] += RETRY_S
    full.write(["d"])
    full.close()
    assert full.lost == 3
    assert full.problem == ""
    assert full.path.read_text() == "d\n"
    for kept, text in (("half", "half\nf\n"), ("whole\n", "whole\nf\n")):
        full.path = Path("/dev/full")
        full.write(["e"])
        full.path = tmp_path / "kept.log"
        full.path.write_text(kept)
        now[0] += RETRY_S
        full.write(["f"])
        full.close()
        assert full.path.read_text() == text, "what is left of a line stays one"
    with open("/dev/full", "w", encoding="ascii") as stream:
        sink = StreamSink(lambda: stream)
        sink.write(["€"])
        assert sink.lost == 1
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    StreamSink(lambda: None).write(["x"])


def test_instances_in_one_folder_have_files_of_their_own(tmp_path: Path) -> None:
    logs = ProcessLogs(Lines())
    names = [f"{kind}_{instance}" for kind in ("proxy", "controller") for instance in ("one", "two")]
    for name in names:
        component, instance = name.split("_")
        tags = Tags(component=component, instance=instance)
        logs.configure(name, tags, {"logs_dir": str(tmp_path)})
        logs.write(record(f"of {name}"), tags, has_handlers=False)
    logs.close()
    texts = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert len(texts) == 4
    for name in names:
        (text,) = [text for file, text in texts.items() if file.startswith(f"{name}_")]
        assert text.count(" -- ") == text.count(f"of {name}") == 1


def test_each_replica_logs_by_its_own_settings(tmp_path: Path) -> None:
    out = Lines()
    logs = ProcessLogs(out)
    logs.configure("shop/Model#abc", REPLICA, {"encoding": "JSON", "log_level": "WARNING"})
    logs.configure("proxy", PROXY, {"logs_dir": str(tmp_path), "output": "both"})
    assert logs.only_replica() == REPLICA
    ours = record()
    ours.name = "ray.serve.mine"
    assert logs.is_below_level(ours, REPLICA)
    assert not logs.is_below_level(ours, PROXY)
    assert not logs.is_below_level(record(), REPLICA)  # a logger of the user's
    assert logs.write(record("hello"), REPLICA, has_handlers=False)
    assert json.loads(out.lines.pop())["message"] == "hello"
    assert not logs.write(record("hello"), REPLICA, has_handlers=True)
    assert logs.write(record("of the proxy"), PROXY, has_handlers=False)
    assert logs.write(record("of a replica that is gone"), Tags(replica="other#1"), has_handlers=False)
    assert out.lines.pop().endswith("of a replica that is gone")
    logs.wake = lambda *gone: None
    logs.access((*access(proxy="proxy"),))
    logs.access((*access(backend="shop/Model", replica="shop/Model#abc", method="CALL"),))
    logs.drain()
    assert out.lines[1].startswith("INFO:     1.2.3.4")
    assert json.loads(out.lines[2])["method"] == "CALL"
    file, of_gone = sorted(tmp_path.iterdir())
    assert "of a replica that is gone" in of_gone.read_text()
    assert "of the proxy" in file.read_text()
    assert "GET /a" in file.read_text()
    logs.wake = lambda *gone: logs.drain(gone=gone)
    logs.forget("shop/Model#abc")
    assert logs.only_replica() is None
    logs.close()
    assert logging.getLogger("ray.serve").level == logging.NOTSET


def test_lines_that_nobody_writes_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_module, "BATCH", 2)
    monkeypatch.setattr(access_module, "MAX_READY", 4)
    out = Lines()
    logs = ProcessLogs(out)
    logs.configure("proxy", PROXY, {})
    woken: list[int] = []
    logs.wake = lambda: woken.append(1)
    for _ in range(7):
        logs.access((*access(proxy="proxy"),))
    assert woken == [1]
    assert list(logs.samples()) == [("log_records_dropped", ("access",), 2)]
    assert not out.lines  # the thread that adds a line formats lines, but writes none
    # A query for logs also returns lines that are not written yet.
    assert len(logs.ring) == 6
    logs.drain()
    assert len(logs.ring) == 7
    assert (len(out.lines), logs.losses()) == (4, {"access": 3})
    logs.close()


def test_a_line_does_not_wait_for_a_thread_that_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_module, "BATCH", 2)
    kept: list[int] = []

    def keep(lines: Sequence[AccessLine]) -> None:
        kept.append(len(lines))
        if len(kept) == 1:  # another line is added while these are formatted
            for _ in range(3):
                lines_of_process.add((*access(),))

    lines_of_process: access_module.AccessLines[None] = access_module.AccessLines(
        lambda name: (access_text, (None,)), lambda: False, keep, lambda: None
    )
    for _ in range(2):
        lines_of_process.add((*access(),))
    ready, for_handlers = lines_of_process.take()
    assert kept == [2, 3]
    assert len(ready[None]) == 5
    assert not for_handlers
    # A request does not fail if its line completes a batch with a line that cannot be formatted.
    lines_of_process.add((*access(client=()),))
    lines_of_process.add((*access(),))
    ready, _ = lines_of_process.take()
    assert (len(ready[None]), lines_of_process.dropped) == (1, 1)


def test_memory_is_bounded_by_number_and_by_size() -> None:
    ring = Ring(max_entries=5, max_bytes=10_000)
    for number in range(9):
        ring.add(record("%s", number), REPLICA)
    assert [each["message"] for each in ring.rows()] == list("45678")
    ring.add(record("y" * 1_000_000), REPLICA)
    *_, last = ring.rows()
    assert len(last["message"]) == MAX_TEXT + 3
    ring.add(record("%s%s", "z" * 1_000_000, "a"), REPLICA)
    assert len(ring) == 1
    # The traceback, which is formatted later, counts towards the size, too.
    failed = ring.add(record("failed"), REPLICA)
    ring.add_traceback(failed, "t" * MAX_TEXT)
    assert [each["message"] for each in ring.rows()] == ["failed"]
    ring.add_traceback(failed, "t" * 20_000)
    assert not len(ring)
    for number in range(5):
        ring.add(record("%s", number), REPLICA)
    assert len(ring) == 5, "nothing of the others counts any more"


def test_kept_records_are_text_for_any_logged_value() -> None:
    class Rude:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    ring = Ring()
    rude: Any = Rude()
    for made in (record(rude), record("%d", rude), record("%s", {"a": [1]}), record("%(a)s", {"a": 1})):
        kept = ring.add(made, REPLICA)
        assert kept.args is None
    ring.add(record("%s", "caf\udce9"), REPLICA)
    texts = [each["message"] for each in ring.rows()]
    assert texts == [
        "<Rude: RuntimeError in its text>",
        "%d (TypeError in its arguments)",
        "{'a': [1]}",
        "1",
        "caf\\udce9",
    ]
    assert text_of(record(rude), REPLICA, LogSettings()).endswith(" -- <Rude: RuntimeError in its text>")


def test_the_last_records_of_a_replica_that_is_gone_are_written(tmp_path: Path) -> None:
    logs = ProcessLogs(Lines())
    queue: list[tuple[Any, ...]] = []
    logs.wake = lambda *gone: queue.append(gone)
    logs.configure("shop/Model#abc", REPLICA, {"logs_dir": str(tmp_path)})
    logs.access((*access(replica="shop/Model#abc", method="CALL"),))
    logs.forget("shop/Model#abc")
    access_line, end = queue
    logs.drain(gone=access_line)
    logs.write(record("the last"), REPLICA, has_handlers=False)
    logs.drain(gone=end)
    (file,) = tmp_path.iterdir()
    assert [line.rpartition(" -- ")[2] for line in file.read_text().splitlines()] == [
        "CALL /a OK 12.3ms",
        "the last",
    ]
    assert not logs.write(record("later"), REPLICA, has_handlers=False)
    assert logs.losses() == {}  # not "0 (file)"
    logs.close()


def test_running_actors_write_as_their_changed_settings_say(tmp_path: Path) -> None:
    out = Lines()
    logs = ProcessLogs(out)
    bad = tmp_path / "file"
    bad.touch()
    logs.configure("shop/Model#abc", REPLICA, {"logs_dir": str(bad)})
    logs.write(record("lost"), REPLICA, has_handlers=False)
    assert "FileExistsError" in logs.problems()[0]
    for max_file_bytes in (1 << 20, 4096):
        config = {"logs_dir": str(tmp_path / "logs"), "max_file_bytes": max_file_bytes, "max_files": 1}
        logs.configure("shop/Model#abc", REPLICA, config)
        assert logs.problems() == []
        for _ in range(2):
            logs.write(record("x" * 3000), REPLICA, has_handlers=False)
    assert len(list((tmp_path / "logs").iterdir())) == 2
    logs.configure("shop/Model#abc", REPLICA, {"output": "stdout"})
    logs.configure("proxy", PROXY, None)
    logs.access((*access(proxy="proxy"),))
    assert out.lines.pop().startswith("INFO:     1.2.3.4")
    logs.close()


def test_files_of_actors_that_ended_long_ago_are_deleted(tmp_path: Path) -> None:
    now = time_of_day()

    def old(name: str, days: float) -> str:
        path = tmp_path / name
        path.touch()
        os.utime(path, (now - days * 86400,) * 2)
        return name

    kept = FileSink(tmp_path / "replica_shop_Model_idle.log", 1 << 20, 5)
    kept.write(["a line"])
    stays = {
        old("replica_shop_Model_idle.log", 31),
        old("replica_shop_Model_idle.log.1", 31),  # the rotated file of a replica that still runs
        old("replica_shop_Model_young.log", 29),
        old("notes.log", 99),
    }
    for gone in ("replica_shop_Model_gone.log", "replica_shop_Model_gone.log.2", "proxy_i_host_17.log"):
        old(gone, 31)
    for days, left in ((None, 7), (30.0, 4)):
        logs = ProcessLogs(Lines())
        logs.configure("shop/Model#abc", REPLICA, {"logs_dir": str(tmp_path), "ended_files_days": days})
        logs.write(record(), REPLICA, has_handlers=False)
        assert len({each.name for each in tmp_path.iterdir()} - {"replica_shop_Model_abc.log"}) == left
        logs.close()
    assert {each.name for each in tmp_path.iterdir()} == {*stays, "replica_shop_Model_abc.log"}
    kept.close()


def test_a_handler_that_raises_loses_only_its_own_line() -> None:
    out = Lines()
    logs = ProcessLogs(out)
    logs.wake = lambda *gone: None
    logger, got = logging.getLogger("daskserve.access"), []

    def call(source: logging.Logger, made: logging.LogRecord) -> None:
        got.append(made.getMessage())
        raise RuntimeError

    handler = logging.NullHandler()
    logger.addHandler(handler)
    try:
        logs.access((*access(),))
        logs.access((*access(),))
        logs.call_handlers = call
        logs.drain()
    finally:
        logger.removeHandler(handler)
    assert len(got) == 2
    assert logs.losses() == {"handler": 2}


def test_a_query_finds_the_newest_or_what_came_later() -> None:
    ring = Ring()
    for number in range(10):
        made = record("%s", number)
        if number % 2:
            made.levelname, made.levelno = "MY LEVEL", logging.ERROR
        ring.add(made, REPLICA if number < 8 else PROXY)
    rows = list(ring.rows())

    def texts(after: int | None = None, **fields: Any) -> str:
        return "".join(each["message"] for each in Query(**fields).select(rows, after))

    assert texts(limit=3) == "789"
    assert texts(level="warning") == "13579"
    assert texts(application="shop", limit=2) == "67"
    assert texts(replica="abc") == texts(replica="shop/Model#abc") == texts(deployment="Model") == "01234567"
    assert texts(grep="4") == "4"
    assert texts(rows[2]["number"], limit=3) == "345"
    assert [each["message"] for each in ring.rows(rows[7]["number"])] == ["8", "9"]


@each_case("field", ["request_id", "trace_id", "message", "exception"])
def test_a_query_finds_the_records_of_one_request(field: str) -> None:
    ring = Ring()
    ring.add(record("asked"), REPLICA)
    rows = [{**each, field: text} for each in ring.rows() for text in ("a-3", "a-30", "b-3", "")]
    assert [each[field] for each in Query(grep="a-3").select(rows)] == ["a-3", "a-30"]


def test_requests_that_have_ended_are_lines_if_their_deployment_wants_that() -> None:
    out = Lines()
    logs = ProcessLogs(out)
    logs.wake = lambda *gone: None
    clock = SimpleNamespace(wall=lambda: 5.0)
    scope = {"type": "http", "method": "POST", "path": "/é", "client": None}
    log, other = (AccessLog(logs, clock, name) for name in ("proxy/a", "proxy/b"))  # type: ignore[arg-type]
    for is_on, wanted in ((True, None), (False, True), (True, False), (False, None)):
        log.configure({"enable_access_log": is_on})
        request = IngressRequest([(b"x-request-id", b"r1")], PassedResponse(None))  # type: ignore[arg-type]
        request.route = Route("/", "shop/Model", frozenset(), access_log=wanted)
        log.note(request, scope, 0.5)
    socket = {"type": "websocket", "path": "/w", "client": ("h", 1), "http_version": "1.1"}
    request.response.status = 101
    log.note(request, socket, 0.5)
    log.configure({})
    log.note(request, {**socket, "query_string": b"a=1"}, 2)
    log.refused(("h", 2), "G\nINFO", "", "1.1", 400)
    # The actor belongs to another instance, which has no logs.
    other.configure(None)
    other.note(request, socket, 0.5)
    log.close()
    logs.drain()
    logs.close()
    first = 'INFO:     :0 - "POST /\\xc3\\xa9 HTTP/" 499 Client Closed Request'
    assert out.lines == [
        first,
        first,
        'INFO:     h:1 - "WebSocket /w?a=1" 101 Switching Protocols',
        'INFO:     h:2 - "- - HTTP/1.1" 400 Bad Request',
    ]
    assert next(logs.ring.rows())["request_id"] == "r1"


def test_routes_say_whether_their_requests_are_logged() -> None:
    table = RouteTable({"/": {"endpoint": "e", "methods": ["GET"], "access_log": False}})
    found = table.match("/x")
    assert found is not None
    assert found.access_log is False
