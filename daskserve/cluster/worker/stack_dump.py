"""The stacks of a process that cannot run Python, because code in C holds its interpreter's lock.

`faulthandler` writes them within a signal handler, which needs no lock. The process writes to an unnamed
file, which another process has opened and reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
from pathlib import Path

#: A signal that neither Python nor its libraries use; None where the system has none.
SIGNAL: int | None = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else None
#: Timeout of a dump in seconds, interval between two reads of its file, and maximum size of the file.
DUMP_S, LOOK_S, MAX_BYTES = 1.0, 0.02, 200_000
#: Maximum length of the stacks of a crash.
MAX_CRASH = 4000


def answer_with_stacks(file: int) -> None:
    """Write the stacks of this process to a file whenever it gets `SIGNAL`, and when native code crashes."""
    faulthandler.enable(file)
    if SIGNAL is not None:
        faulthandler.register(SIGNAL, file=file, all_threads=True)


def crash_in(file: int) -> str:
    """Return the error and the crashed thread's stack, which a process wrote to its file when it crashed."""
    text = os.pread(file, MAX_BYTES, 0).decode(errors="replace")
    _, found, rest = text.rpartition("Fatal Python error:")
    error, _, stacks = rest.partition("\n\n")
    # Other threads come first, and the names of extension modules last.
    _, current, stack = stacks.partition("Current thread")
    stack = (current + stack if current else stacks).partition("\n\n")[0].rstrip("\n")
    return f"{found}{error}\n{stack}"[:MAX_CRASH] if found else ""


async def ask_for_stacks(pid: int, file: int) -> str:
    """Return the stacks that a process writes to a file; empty if it is stopped or handles no signals."""
    if SIGNAL is None or not _catches(pid, SIGNAL):
        return ""
    own = os.dup(file)  # the original is closed when the process ends
    try:
        os.lseek(own, 0, os.SEEK_SET)  # the process writes from the beginning, too
        os.ftruncate(own, 0)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, SIGNAL)
        loop = asyncio.get_running_loop()
        ends_at, seen = loop.time() + DUMP_S, 0
        while loop.time() < ends_at:
            await asyncio.sleep(LOOK_S)
            size = os.fstat(own).st_size
            if size and size == seen:
                break
            seen = size
        return os.pread(own, MAX_BYTES, 0).decode(errors="replace")
    finally:
        os.close(own)


def _catches(pid: int, number: int) -> bool:
    """Return whether a process handles a signal; if it does not, the signal would end it."""
    caught = _status(pid).get("SigCgt", "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def process_state(pid: int) -> str:
    """Return the state of a process, such as ``T (stopped)``; empty if it is unknown."""
    return _status(pid).get("State", "")


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}  # it has ended, or this is not Linux
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
