"""Progress of a slow change: one line on a terminal or in a notebook, log records elsewhere."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol, TextIO, TypeAlias

from daskserve.client.views.status import Status
from daskserve.common.formatting import counted
from daskserve.common.types import GoalId, short_tag
from daskserve.internals.ipython import in_notebook
from daskserve.options.specs import deployment_tag

logger = logging.getLogger("daskserve.client")

#: How long a change may take without a display, and how often the display changes.
QUIET_S, PERIOD_S = 2.0, 1.0
#: Interval of the log records, without a display.
LOG_S = 30.0


class Display(Protocol):
    """A line that changes."""

    def update(self, text: str) -> None:
        """Show a string instead of the previous one."""

    def close(self) -> None:
        """Remove the line."""


class RichDisplay(Display):
    """A line with a spinner, drawn by rich."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        # In a notebook, rich finds the cell itself.
        console = Console(file=stream) if _is_terminal(stream) else Console()
        self._status = console.status("")
        self._is_shown = False

    def update(self, text: str) -> None:
        # Square brackets in the text, as in a list of resources, are not markup.
        from rich.text import Text

        self._status.update(Text(text))
        if not self._is_shown:
            self._status.start()
            self._is_shown = True

    def close(self) -> None:
        self._status.stop()


class LineDisplay(Display):
    """A new line for each update, where rich is not installed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._text = ""

    def update(self, text: str) -> None:
        if text != self._text:
            self._text = text
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def close(self) -> None:
        """Do nothing: the lines stay."""


DisplayFactory: TypeAlias = Callable[[], Display]


def find_display() -> DisplayFactory | None:
    """Return a factory of displays, on a terminal or in a notebook; None otherwise."""
    stream = sys.stderr
    if threading.current_thread() is not threading.main_thread():
        return None  # such as user code in a worker, which may have inherited a terminal
    return (lambda: _make(stream)) if _is_terminal(stream) or in_notebook() else None


def _is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal; a program may have closed it, or put any object in its place."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


def _make(stream: TextIO) -> Display:
    try:
        return RichDisplay(stream)
    except ImportError:
        return LineDisplay(stream)


def announce(text: str) -> None:
    """Print a line on a terminal or in a notebook; log it elsewhere."""
    if find_display() is None:
        logger.info("%s", text)
        return
    # A notebook shows its errors in red.
    stream = sys.stdout if in_notebook() else sys.stderr
    with suppress(OSError, ValueError):
        LineDisplay(stream).update(text)


def waits_for(status: Status, goal: GoalId) -> str:
    """Return one line about the replicas that a change waits for."""
    found = next((each for each in status.goals if each.goal_id == goal), None)
    name = "" if found is None else found.backend
    if found is not None and found.application in status.applications:
        app = status.applications[found.application]
        late = [each for each, state in app.deployments.items() if state.status != "HEALTHY"]
        if not late:
            return f"{found.application}: {app.status}"
        # The other deployments wait for the first one. The tag of an actor is longer than its name.
        wanted = deployment_tag(found.application, late[0])
        name = next((each for each in reversed(list(status.backends)) if short_tag(each) == wanted), wanted)
    backend = status.backends.get(name)
    if backend is None:
        return "Waiting for a change"
    states = [each.state for each in status.replicas(name)]
    wanted = counted(backend.wanted, "replica runs", "replicas run")
    text = f"{short_tag(name)}: {backend.running} of {wanted}"
    doing = {each.message for each in status.replicas(name) if each.state == "STARTING" and each.message}
    counts = (
        (states.count("STARTING"), f"starting ({doing.pop()})" if len(doing) == 1 else "starting"),
        (states.count("SHOULD_START"), "waiting for a worker"),
        (states.count("SHOULD_STOP") + states.count("STOPPING"), "stopping"),
    )
    parts = [f"{count} {what}" for count, what in counts if count]
    messages = [backend.message.partition("\n")[0], status.problems.get("store", "")]
    return "; ".join([", ".join([text, *parts]), *filter(None, messages)])


async def wait_visibly(
    make_display: DisplayFactory | None,
    wait: Callable[[float], Awaitable[bool]],
    describe: Callable[[], Awaitable[str]],
    *,
    quiet_s: float = QUIET_S,
    period_s: float = PERIOD_S,
    log_s: float = LOG_S,
) -> None:
    """Call ``wait`` with a number of seconds until it returns True; show why that takes long."""
    if make_display is None:
        while not await wait(log_s):
            logger.warning("Still waiting: %s", await describe())
        return
    if await wait(quiet_s):
        return
    display = make_display()
    try:
        display.update(await describe())
        while not await wait(period_s):
            display.update(await describe())
    finally:
        display.close()
