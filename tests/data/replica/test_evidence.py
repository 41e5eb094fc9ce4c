"""Which frames on the stack of a loop count as user code."""

from __future__ import annotations

import sys
import threading
import types
from typing import Any

from tables import case

from daskserve.data.replica.execution.evidence import (
    BLOCKED_AFTER_S,
    WATCH_INTERVAL_S,
    Evidence,
    describe,
    starved_s,
    user_call,
)


def stack(*modules: str) -> list[Any]:
    """Return the frames of a stack, given outermost first."""
    frames: list[Any] = []
    for line, module in enumerate(modules):
        code = types.SimpleNamespace(co_filename=f"/src/{module}.py", co_name="run")
        back = frames[-1] if frames else None
        frames.append(
            types.SimpleNamespace(f_back=back, f_globals={"__name__": module}, f_code=code, f_lineno=line)
        )
    return frames


def test_the_outermost_call_of_user_code_is_found() -> None:
    for modules, call in [
        (["threading", "asyncio.events", "daskserve.data.replica.user_code.servable", "app"], 3),
        # A background task of the user's.
        (["__main__", "asyncio.base_events", "asyncio.events", "app"], 3),
        # An ASGI application, and a library that it calls.
        (
            [
                "asyncio.events",
                "daskserve.data.replica.user_code.servable",
                "fastapi.applications",
                "app",
                "json",
            ],
            2,
        ),
        # User code that waits for an answer instead of awaiting it.
        (
            [
                "asyncio.events",
                "daskserve.data.replica.user_code.servable",
                "app",
                "distributed.client",
                "threading",
            ],
            2,
        ),
        (
            [
                "asyncio.events",
                "daskserve.data.replica.user_code.servable",
                "app",
                "daskserve.data.caller",
                "threading",
            ],
            2,
        ),
        # Behind the proxy of the same process.
        (["asyncio.events", "uvicorn.protocols", "daskserve.proxies", "daskserve.data.replica", "app"], 4),
    ]:
        with case(modules, call):
            frames = stack(*modules)
            assert user_call(frames[-1]) is frames[call]


def test_libraries_and_the_rest_of_a_program_are_no_user_code() -> None:
    for modules in [
        ["threading", "asyncio.base_events", "selectors"],
        ["threading", "daskserve.data.replica.execution.user_threads", "queue"],
        ["asyncio.events", "daskserve.data.replica.replica", "logging", "rich.traceback"],
        ["asyncio.events", "distributed.core", "cloudpickle", "numpy"],
        ["asyncio.events", "tornado.http1connection"],
        ["runpy", "app"],
        ["app"],
    ]:
        with case(modules):
            assert user_call(stack(*modules)[-1]) is None
            assert user_call(None) is None


def test_the_place_begins_with_the_users_own_line() -> None:
    frames = stack("asyncio.events", "daskserve.data", "app", "model", "distributed.client", "threading")
    assert describe(frames[-1], frames[2]) == (
        "/src/model.py:3 run < /src/app.py:2 run (in /src/threading.py:5 run)"
    )
    assert describe(frames[3], frames[2]) == "/src/model.py:3 run < /src/app.py:2 run"


def test_one_call_that_stays_explains_a_delay() -> None:
    frame, evidence = stack("asyncio.events", "app")[-1], Evidence()
    for _ in range(4):
        evidence.add(frame, WATCH_INTERVAL_S)
    assert evidence.explains(4 * WATCH_INTERVAL_S)
    assert not evidence.explains(BLOCKED_AFTER_S / 2)
    assert "app.py" in evidence.place


def test_many_short_calls_and_late_samples_explain_no_delay() -> None:
    saturated = Evidence()
    for _ in range(10):
        saturated.add(stack("asyncio.events", "app")[-1], WATCH_INTERVAL_S)
    assert not saturated.explains(10 * WATCH_INTERVAL_S)
    starved, frame = Evidence(), stack("asyncio.events", "app")[-1]
    for _ in range(10):
        starved.add(frame, 10 * WATCH_INTERVAL_S)
    assert not starved.explains(100 * WATCH_INTERVAL_S)


def test_a_call_that_waits_for_a_processor_explains_no_delay() -> None:
    frame, evidence, starved_s = stack("asyncio.events", "app")[-1], Evidence(), 1.0
    for _ in range(10):
        starved_s += 0.9 * WATCH_INTERVAL_S
        evidence.add(frame, WATCH_INTERVAL_S, starved_s)
    assert not evidence.explains(10 * WATCH_INTERVAL_S)


def test_real_frames_have_what_the_evidence_reads() -> None:
    assert user_call(sys._getframe()) is None  # pytest called this test, not a loop


def test_the_time_of_a_running_thread_is_known_or_zero() -> None:
    first = starved_s(threading.get_native_id())
    assert 0 <= first <= starved_s(threading.get_native_id())


def test_no_thread_waits_for_no_time() -> None:
    assert starved_s(None) == 0
    assert starved_s(0) == 0
