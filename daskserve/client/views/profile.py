"""The results of ``profile()`` and ``stacks()``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from daskserve.telemetry.profiling import report
from daskserve.telemetry.profiling.flame import flame_page, flame_svg
from daskserve.telemetry.profiling.stacks import stack_text


class Profile:
    """A profile of one replica's user code. Printed, it is a table of functions and lines.

    Attributes
    ----------
    values : dict
        Plain values: ``replica``, ``deployment``, ``application``, ``worker``, ``pid``, ``seconds``, and
        either ``memory`` or ``functions`` (name, file, line), ``stacks`` (numbers of functions from the
        outermost on, samples, samples on a processor), ``lines`` (file, line, function, samples), ``ticks``,
        ``busy``, ``idle``, ``dropped``, ``interval_s`` and ``overhead``.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)

    @property
    def replica(self) -> str:
        """The tag of the replica."""
        return str(self.values["replica"])

    def to_svg(self) -> str:
        """Return the flame graph as an SVG."""
        return flame_svg(self.values)

    def to_html(self) -> str:
        """Return a page with the flame graph, which can be enlarged and searched, and the hottest lines."""
        return flame_page(self.values)

    def to_collapsed(self) -> str:
        """Return the stacks as lines that other tools for flame graphs read, such as speedscope."""
        return report.collapsed(self.values)

    def __str__(self) -> str:
        return report.text(self.values)

    def __repr__(self) -> str:
        return f"<Profile of {self.replica}: {report.summary(self.values)}>"

    def _repr_svg_(self) -> str | None:
        return self.to_svg() if "stacks" in self.values else None


class Stacks:
    """The stacks of the threads and tasks of one replica's user code at one moment. Print it to read them.

    Attributes
    ----------
    values : dict
        Plain values: ``replica``, ``worker``, ``pid``, ``stage``, and ``threads`` and ``tasks`` with their
        ``frames``, the innermost last.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)

    def to_text(self, *, is_full: bool = False) -> str:
        """Return the stacks as a string; with ``full``, including frames and threads outside of user code."""
        return stack_text(self.values, is_full=is_full)

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        return f"<Stacks of {self.values['replica']}>"
