"""Samples of stacks, flame graphs and reports."""

from __future__ import annotations

import re
import threading
import tracemalloc
import types
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from typing import Any

import pytest
from tables import each_case

from daskserve.telemetry.profiling import flame, memory, sampling
from daskserve.telemetry.profiling.flame import flame_page, flame_svg, page_policy, tree_of
from daskserve.telemetry.profiling.frames import UserFrames
from daskserve.telemetry.profiling.report import collapsed, size, summary, text
from daskserve.telemetry.profiling.sampling import CodeThread, Samples, sample_threads

THREAD = CodeThread("threads")
HOSTILE = "<script>alert(1)</script>\"'&\x00\x1b]"


def stack(*functions: tuple[str, str]) -> Any:
    """Return the innermost frame of a stack of modules and functions, outermost first."""
    frame = None
    for module, name in functions:
        code = _code(module, name)
        frame = types.SimpleNamespace(f_back=frame, f_globals={"__name__": module}, f_code=code, f_lineno=7)
    return frame


_CODES: dict[tuple[str, str], Any] = {}


def _code(module: str, name: str) -> Any:
    def function() -> None: ...

    made = function.__code__.replace(
        co_name=name, co_qualname=name, co_filename=f"/src/{module}.py", co_firstlineno=5
    )
    return _CODES.setdefault((module, name), made)


MACHINERY = (("threading", "run"), ("daskserve.data", "work"))


@each_case(
    ("functions", "expected"),
    [
        ((*MACHINERY, ("app", "call"), ("json", "dumps")), ["call", "dumps"]),
        (MACHINERY, []),
        # A thread that user code has started.
        ((("threading", "run"), ("app", "work"), ("queue", "get")), ["work", "get"]),
        # User code that calls daskserve, which calls user code.
        ((*MACHINERY, ("app", "call"), ("daskserve.data", "map"), ("app", "each")), ["call", "map", "each"]),
        # The main module of a process that waits.
        ((("__main__", "<module>"), *MACHINERY), []),
        ((("__main__", "<module>"), *MACHINERY, ("__main__", "call")), ["call"]),
    ],
)
def test_a_stack_begins_at_the_first_call_of_user_code(
    functions: tuple[tuple[str, str], ...], expected: list[str]
) -> None:
    found = UserFrames().stack(stack(*functions))
    assert [each.f_code.co_qualname for each in found] == expected


def profile_of(samples: Samples, **more: Any) -> dict[str, Any]:
    place = {"replica": "shop/Model#abc", "worker": "tcp://w:1", "pid": 7}
    times = {"seconds": 1.0, "interval_s": 0.01, "ticks": samples.busy, "overhead": 0.01}
    return {**place, **times, **samples.plain(), **more}


def test_samples_are_counted_by_stack_and_shown() -> None:
    samples = Samples()
    for _ in range(3):
        samples.add(THREAD, stack(*MACHINERY, ("app", "call"), ("app", "inner")), 0.01)
    samples.add(THREAD, stack(*MACHINERY, ("app", "call")), 0.01)
    samples.add(THREAD, stack(*MACHINERY), 0.01)
    found = profile_of(samples)
    assert (samples.busy, samples.idle) == (4, 1)
    assert collapsed(found) == "threads;call;inner 3\nthreads;call 1\n"
    root = tree_of(found)
    assert root.count == 4
    (threads,) = root.calls.values()
    (call,) = threads.calls.values()
    assert (call.name, call.file, call.count, call.running) == ("call", "/src/app.py", 4, 4)
    shown = text(found)
    assert re.search(r"75\.0% +75\.0% +inner +/src/app\.py:5", shown)
    assert re.search(r"25\.0% +100\.0% +call ", shown)
    assert re.search(r"75\.0% +inner +/src/app\.py:7", shown)


def test_samples_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MAX_STACKS", 3)
    samples = Samples()
    for number in range(5):
        samples.add(THREAD, stack(*MACHINERY, ("app", f"f{number}")), 0.01)
    deep = stack(*MACHINERY, ("app", "f0"), *[("app", "again")] * 1000)
    Samples().add(THREAD, deep, 0.01)
    found = profile_of(samples)
    assert (len(found["stacks"]), found["dropped"]) == (3, 2)
    assert "2 samples of rarer stacks are left out" in summary(found)
    many = Samples()
    many.add(THREAD, deep, 0.01)
    assert len(many.plain()["stacks"][0][0]) == sampling.MAX_DEPTH + 1


def test_names_of_users_are_never_markup() -> None:
    samples = Samples()
    samples.add(CodeThread(HOSTILE), stack(*MACHINERY, ("app", HOSTILE), ("app", "x" * 9999)), 0.01)
    found = profile_of(samples, replica=HOSTILE)
    svg, page = flame_svg(found), flame_page(found)
    ElementTree.fromstring(svg)
    for each in (svg, page):
        assert "<script>alert" not in each
        assert "\x00" not in each
    assert page.count("<script>") == 1
    assert len(page) < 30_000
    assert "'unsafe-inline'" not in page_policy().split("script-src")[1]


def test_every_frame_has_a_colour() -> None:
    samples = Samples()
    samples.add(THREAD, stack(*MACHINERY, ("app", "runs")), 0.01)
    svg = ElementTree.fromstring(flame_svg(profile_of(samples)))
    colours = [each.get("fill", "") for each in svg.iter() if each.tag.endswith("rect")]
    background, *frames = colours
    assert background == "#fff"
    assert len(frames) > 1
    # All of them run, so they are warm, each function in its own shade.
    assert all(re.fullmatch("#fa[0-9a-f]{2}50", each) for each in frames), frames
    assert len({*frames}) == len(frames)


def test_a_profile_without_user_code_says_so() -> None:
    found = profile_of(Samples())
    assert "No user code ran." in text(found)
    assert "No user code ran." in flame_svg(found)
    assert flame_page(found)


def test_many_frames_are_drawn_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flame, "MAX_FRAMES", 50)
    samples = Samples()
    for number in range(100):
        samples.add(THREAD, stack(*MACHINERY, ("app", "call"), ("app", f"f{number}"), ("app", "g")), 0.01)
    assert flame_svg(profile_of(samples)).count("<rect") == 51
    ElementTree.fromstring(flame_svg(profile_of(samples)))


def test_threads_are_sampled_until_the_end_or_a_stop() -> None:
    ident, stop = threading.get_ident(), threading.Event()
    threads: Mapping[int, CodeThread] = {ident: CodeThread("threads", threading.get_native_id())}
    found: list[dict[str, Any]] = []
    ticks = 0

    def current() -> Mapping[int, CodeThread]:
        nonlocal ticks
        ticks += 1
        return threads

    def sample() -> None:
        found.append(sample_threads(current, 30, stop, interval_s=0.001))

    sampler = threading.Thread(target=sample)
    sampler.start()
    while ticks < 3:
        sum(range(1000))
    stop.set()
    sampler.join(10)
    assert found[0]["seconds"] < 10
    assert found[0]["ticks"] > 0
    assert found[0]["overhead"] < 1


def test_lines_that_hold_memory_are_named_and_tracing_ends() -> None:
    held: list[bytes] = []
    stop = threading.Event()
    found: dict[str, Any] = {}
    tracer = threading.Thread(target=lambda: found.update(memory.trace_memory(20, stop)))
    tracer.start()
    while not tracemalloc.is_tracing():
        pass
    # A thread of another replica in this process.
    is_over = threading.Event()
    is_over.set()
    assert memory.trace_memory(20, is_over)["was_ended"] is False
    held.append(bytes(3 << 20))
    stop.set()
    tracer.join(20)
    assert not tracemalloc.is_tracing()
    file, _, amount, _, _ = found["lines"][0]
    assert (file, amount >= 3 << 20) == (__file__, True)
    shown = text({"replica": "r", "worker": "w", "pid": 1, "seconds": 1.0, "memory": found})
    assert "3.0 MiB" in shown
    assert "held.append" not in shown
    assert flame_page({"replica": "r", "seconds": 1.0, "memory": found})


@each_case(
    ("count", "shown"), [(0, "0 B"), (1023, "1023 B"), (1 << 20, "1.0 MiB"), (-(1 << 50), "-1024.0 TiB")]
)
def test_sizes_have_units(count: int, shown: str) -> None:
    assert size(count) == shown
