"""A recorded load: the number of requests that arrive in each second.

A trace is a CSV file with a header, in one of two forms. Lines may be in any order.

- ``timestamp_s,requests``: one line per period of a second or longer, with the number of requests in it. The
  period is the shortest distance between two lines.
- ``timestamp_s``: one line per request.

Both forms may have a column ``duration_s`` with the duration of the request, or the mean of the requests.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from daskserve.common.formatting import shown

COLUMNS = ("timestamp_s", "requests", "duration_s")
#: Longest accepted trace. A longer one probably has its timestamps in milliseconds.
LONGEST_S = 366 * 86_400


class TraceError(ValueError):
    """A trace is invalid; the message names the line, the value and the expected form."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests per second, starting at ``starts_at``.

    Attributes
    ----------
    counts : sequence of float
        Number of requests that arrive in each second.
    durations_s : sequence of float
        Mean duration of the requests of each second; empty if the trace has no durations.
    duration_cv : float or None
        Coefficient of variation of durations (standard deviation divided by mean); None if the trace has no
        durations.
    starts_at : float
        Timestamp of the first second, on the clock of the trace.
    """

    counts: Sequence[float]
    durations_s: Sequence[float] = ()
    duration_cv: float | None = None
    starts_at: float = 0.0

    @property
    def requests(self) -> float:
        """Total number of requests."""
        return math.fsum(self.counts)

    @property
    def mean_duration_s(self) -> float | None:
        """Mean duration of a request; None if the trace has no durations."""
        if not self.durations_s or self.requests <= 0:
            return None
        pairs = zip(self.counts, self.durations_s, strict=True)
        return math.fsum(count * duration_s for count, duration_s in pairs) / self.requests


def read_trace(path: str | Path) -> Trace:
    """Read a trace from a CSV file.

    Raises
    ------
    TraceError
        The file is not a valid trace.
    OSError
        The file cannot be opened.
    """
    with open(path, encoding="utf-8-sig", newline="") as file:
        try:
            return parse_trace(file, name=str(path))
        except (UnicodeDecodeError, csv.Error) as error:
            raise TraceError(f"{path} is not a CSV file in UTF-8: {error}") from None


def parse_trace(lines: Iterable[str] | str, *, name: str = "the trace") -> Trace:
    """Parse a trace from lines of CSV; see `read_trace`."""
    reader = csv.DictReader(io.StringIO(lines) if isinstance(lines, str) else lines, skipinitialspace=True)
    columns = [column.strip() for column in reader.fieldnames or ()]
    reader.fieldnames = columns
    if COLUMNS[0] not in columns or set(columns) - set(COLUMNS):
        raise TraceError(
            f"{name} has the columns {', '.join(columns) or 'none'}; make its first line "
            "timestamp_s,requests or, with a line per request, timestamp_s; both may have duration_s too"
        )
    rows = list(_rows(reader, name))
    if not rows:
        raise TraceError(f"{name} has no line below its header; add the requests")
    first = math.floor(min(at for at, _, _ in rows))
    last = math.floor(max(at for at, _, _ in rows))
    if last - first >= LONGEST_S:
        raise TraceError(
            f"{name} goes from {first} to {last}, {(last - first) / 86_400:.0f} days; give timestamp_s in "
            "seconds"
        )
    if "requests" in columns:
        rows = list(_spread(rows))
        last = max(last, math.floor(max(at for at, _, _ in rows)))
    return _collected(rows, first, last, has_durations="duration_s" in columns)


def _rows(reader: csv.DictReader[str], name: str) -> Iterator[tuple[float, float, float]]:
    for row in reader:
        where = f"{name}, line {reader.line_num}"
        if None in row or None in row.values():
            raise TraceError(f"{where} does not have as many values as the header; give one per column")
        at = _number(row, "timestamp_s", where)
        requests = _number(row, "requests", where) if "requests" in row else 1.0
        duration_s = _number(row, "duration_s", where) if "duration_s" in row else 0.0
        if requests < 0 or duration_s < 0:
            raise TraceError(
                f"{where}: requests={shown(requests)} and duration_s={shown(duration_s)}; neither can "
                "be negative"
            )
        yield at, requests, duration_s


def _number(row: Mapping[str, str], column: str, where: str) -> float:
    try:
        value = float(row[column])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise TraceError(f"{where}: {column} is {row[column]!r}; give a number")
    return value


def _spread(rows: Sequence[tuple[float, float, float]]) -> Iterator[tuple[float, float, float]]:
    """Spread the requests of each line evenly over its period, such as the 60 s of a line per minute."""
    ordered = sorted(rows)
    gaps = [later[0] - earlier[0] for earlier, later in itertools.pairwise(ordered)]
    period = max(1, round(min((gap for gap in gaps if gap > 0), default=1.0)))
    for at, requests, duration_s in ordered:
        for second in range(period):
            yield at + second, requests / period, duration_s


def _collected(
    rows: Iterable[tuple[float, float, float]], first: int, last: int, *, has_durations: bool
) -> Trace:
    seconds = last - first + 1
    counts, sums = array("d", bytes(8 * seconds)), array("d", bytes(8 * seconds))
    total = weight = squares = 0.0
    for at, requests, duration_s in rows:
        second = math.floor(at) - first
        counts[second] += requests
        sums[second] += requests * duration_s
        weight += requests
        total += requests * duration_s
        squares += requests * duration_s**2
    if not has_durations or weight <= 0 or total <= 0:
        return Trace(counts, starts_at=float(first))
    mean = total / weight
    durations = array(
        "d", (part / count if count > 0 else mean for part, count in zip(sums, counts, strict=True))
    )
    variance = max(0.0, squares / weight - mean**2)
    return Trace(counts, durations, math.sqrt(variance) / mean, float(first))
