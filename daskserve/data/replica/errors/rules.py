"""Notes that explain errors of user code that are caused by its thread or event loop.

Each note has the rule that the code breaks, and the remedy. The rules are those of "Threads and event loops"
in docs/deployments.md.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from daskserve.payload.error_text import MAX_TEXT, stored_args, stored_attributes

#: The last sentence of each note.
SOURCE = 'See "Threads and event loops" in docs/deployments.md of daskserve.'

_NO_LOOP = (
    "Plain methods, and the constructor of a class without async methods or with event_loop='worker', run "
    "without an event loop. Write `async def __init__` or an async method, which run on the replica's loop."
)
_RUNNING_LOOP = (
    "Async methods, and the constructor of a class that has some, run on the replica's event loop, in which "
    "no other loop can be run. Write `async def __init__` and `await` the coroutine."
)
_OTHER_LOOP = (
    "It was created on a different event loop from that of the method, for example by asyncio.run() or "
    "when a module was imported. Create it in `async def __init__` or in the async method that uses it."
)
_MAIN_THREAD = (
    "The main thread of a worker is Dask's. Deploy with isolation='process': the constructor and the event "
    "loop then run in the main thread of a process of their own."
)
_AWAIT = (
    "Async code has to await Dask's results: instead of dask.compute(x), write `await "
    "get_client().compute(x)`, or compute in a plain method."
)
_NO_CONTEXT = (
    "Dask finds its worker and client in the thread of a method and in asyncio.to_thread(). Start threads of "
    "your own with contextvars.copy_context().run as their target."
)


class Rule(NamedTuple):
    """A note for errors of one class (given by module and name) whose text matches a pattern."""

    error: str
    pattern: str
    note: str


RULES: Sequence[Rule] = (
    Rule(
        "sqlite3.ProgrammingError",
        r"SQLite objects created in a thread can only be used in that same thread",
        "Plain methods run in several threads, and async methods in the thread of the event loop. Deploy "
        "with run_sync_in_threadpool=False to run all of them in one thread, or pass "
        "check_same_thread=False to sqlite3.connect() and guard the connection by a lock.",
    ),
    Rule("builtins.RuntimeError", r"no running event loop|There is no current event loop", _NO_LOOP),
    Rule(
        "builtins.RuntimeError",
        r"cannot be called from a running event loop|event loop is already running"
        r"|while another loop is running",
        _RUNNING_LOOP,
    ),
    Rule(
        "builtins.RuntimeError", r"attached to a different loop|bound to a different event loop", _OTHER_LOOP
    ),
    Rule(
        "builtins.ValueError",
        r"only works? in (the )?main thread|only be called from the main thread",
        _MAIN_THREAD,
    ),
    Rule("builtins.RuntimeError", r"only works in main thread", _MAIN_THREAD),
    Rule(
        "builtins.AttributeError",
        r"'_thread\._local' object has no attribute '(executor|start_time)'",
        "Methods of replicas run in threads of daskserve, which are not Dask's: remove secede() and "
        "rejoin(). A method that waits takes no thread from Dask's tasks.",
    ),
    Rule("builtins.RuntimeError", r"asynchronous Client in a synchronous context", _AWAIT),
    Rule("builtins.TypeError", r"'coroutine' object is not iterable", _AWAIT),
    Rule("builtins.ValueError", r"No worker found|No global client found|No clients found", _NO_CONTEXT),
    Rule("builtins.RuntimeError", r"deserialized outside of the context of a Client or Worker", _NO_CONTEXT),
    Rule(
        "builtins.AttributeError",
        r"'NoneType' object has no attribute '(event|multi_lock|queue|variable)_",
        "This Dask object was created on an event loop that has ended, for example by asyncio.run(). "
        "Create it in the constructor or in the method that uses it.",
    ),
)


def rule_in(text: str) -> str:
    """Return the note of `add_rule` in a traceback, after a space; empty if there is none."""
    return next((f" {line}" for line in text.splitlines() if line.endswith(SOURCE)), "")


def add_rule(error: BaseException) -> None:
    """Add the note of the rule that explains an error, if there is one. Idempotent; runs no user code."""
    args, cls = stored_args(error), type(error)
    text = args[0] if args else None
    if type(text) is not str or len(text) > MAX_TEXT or type(cls) is not type:
        return
    name = f"{cls.__module__}.{cls.__qualname__}"
    for rule in RULES:
        if rule.error == name and re.search(rule.pattern, text):
            note = f"{rule.note} {SOURCE}"
            notes = stored_attributes(error).setdefault("__notes__", [])
            if type(notes) is list and not any(type(each) is str and each == note for each in notes):
                notes.append(note)
            return
