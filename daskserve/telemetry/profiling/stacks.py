"""The stacks of threads and tasks, as plain values and as text."""

from __future__ import annotations

import asyncio
import linecache
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from daskserve.common.formatting import counted, encodable
from daskserve.telemetry.profiling.frames import UserFrames, is_users
from daskserve.telemetry.profiling.sampling import MAX_DEPTH, MAX_NAME, CodeThread

#: Number of threads and of tasks that are listed; the others are counted.
MAX_THREADS, MAX_TASKS = 200, 100
#: Maximum length of a line of code.
MAX_LINE = 200


def stacks_of_threads(
    threads: Mapping[int, CodeThread], frames: Mapping[int, FrameType], names: Mapping[int, str]
) -> list[dict[str, Any]]:
    """Return the stacks of threads, those with user code first, each with its frames, innermost last."""
    found, code = [], UserFrames()
    for ident, thread in threads.items():
        frame = frames.get(ident)
        if frame is not None:
            shown = _frames_from(frame)
            begins = len(shown) - len(code.stack(frame))
            has_code = begins < len(shown)
            for number, each in enumerate(shown):
                each["is_users"] = number >= begins and each["is_users"]
            name = encodable(names.get(ident, thread.label)[:MAX_NAME])
            found.append(
                {"name": name, "kind": encodable(thread.label), "runs_code": has_code, "frames": shown}
            )
    return sorted(found, key=lambda each: not each["runs_code"])[:MAX_THREADS]


def stacks_of_tasks(loop: asyncio.AbstractEventLoop) -> tuple[list[dict[str, Any]], int]:
    """Return the tasks of an event loop that wait in user code, and the number of those not listed.

    If this is called from another thread, the loop keeps running, so a stack may mix two moments.
    """
    found: list[dict[str, Any]] = []
    for task in asyncio.all_tasks(loop):
        shown = _frames_of_task(task)
        if any(each["is_users"] for each in shown):
            found.append({"name": encodable(str(task.get_name())[:MAX_NAME]), "frames": shown})
    found.sort(key=lambda each: each["name"])
    return found[:MAX_TASKS], max(0, len(found) - MAX_TASKS)


def _frames_from(frame: FrameType | None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while frame is not None and len(found) < MAX_DEPTH:
        found.append(_shown(frame, frame.f_lineno or 0))
        frame = frame.f_back
    return found[::-1]


def _frames_of_task(task: asyncio.Task[Any]) -> list[dict[str, Any]]:
    """Return the chain of coroutines in which a task waits, innermost last."""
    found: list[dict[str, Any]] = []
    waits: Any = task.get_coro()
    while waits is not None and len(found) < MAX_DEPTH:
        # Coroutines, generators and asynchronous generators use different names for the same attributes.
        for kind in ("cr", "gi", "ag"):
            if hasattr(waits, f"{kind}_frame"):
                frame = getattr(waits, f"{kind}_frame")
                if frame is not None:
                    found.append(_shown(frame, frame.f_lineno or 0))
                waits = getattr(waits, "gi_yieldfrom" if kind == "gi" else f"{kind}_await", None)
                break
        else:
            return found
    return found


def _shown(frame: FrameType, line: int) -> dict[str, Any]:
    code = frame.f_code
    # The source, if the interpreter can read it; user code that was pickled by value has none.
    text = linecache.getline(code.co_filename, line, frame.f_globals).strip()
    return {
        "function": code.co_qualname[:MAX_NAME],
        "file": encodable(code.co_filename),
        "line": line,
        "text": encodable(text[:MAX_LINE]),
        "is_users": is_users(frame),
    }


def stack_text(found: Mapping[str, Any], *, is_full: bool = False) -> str:
    """Return the result of `Client.stacks` as text.

    Parameters
    ----------
    is_full : bool
        Whether to show threads without user code, and the frames outside of user code, too.
    """
    head = f"Replica {found['replica']} on {found['worker']}, process {found['pid']}"
    parts = [head + (f", {found['stage']}" if found.get("stage") else "")]
    for kind, each in (
        *(("Thread", each) for each in found.get("threads", ())),
        *(("Task", each) for each in found.get("tasks", ())),
    ):
        frames = each["frames"] if is_full else _from_user_code(each["frames"])
        if frames:
            label = f" ({each['kind']})" if each.get("kind") not in (None, each["name"]) else ""
            parts.append("\n".join([f"{kind} {each['name']}{label}:", *map(_frame_text, frames)]))
    if found.get("native"):
        parts.append(f"{found['note']}\n{found['native'].rstrip()}")
    elif found.get("note"):
        parts.append(found["note"])
    elif len(parts) == 1:
        parts.append("No user code runs.")
    if found.get("more_tasks"):
        parts.append(f"... and {counted(found['more_tasks'], 'more task')}.")
    return "\n\n".join(parts)


def _from_user_code(frames: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    for number, each in enumerate(frames):
        if each["is_users"]:
            return frames[number:]
    return ()


def _frame_text(frame: Mapping[str, Any]) -> str:
    text = f"  {frame['file']}:{frame['line']} in {frame['function']}"
    return f"{text}\n    {frame['text']}" if frame["text"] else text
