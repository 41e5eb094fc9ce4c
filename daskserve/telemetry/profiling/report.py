"""Profiles as text: the functions and lines that took the time, or the lines that hold memory. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from daskserve.common.formatting import shown

#: Maximum number of rows of a table.
MAX_ROWS = 20
#: Binary units of sizes.
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
#: A title, the names of the columns, and the rows.
Table: TypeAlias = tuple[str, Sequence[str], Sequence[Sequence[str]]]


def percent(part: float, whole: float) -> str:
    """Return a share as a string."""
    return f"{100 * part / whole:.1f}%" if whole else "0.0%"


def place(file: str, line: int) -> str:
    """Return the location of a function."""
    return f"{file}:{line}" if file else ""


def size(count: float) -> str:
    """Return a number of bytes with a unit."""
    number, unit = float(count), _UNITS[0]
    for unit in _UNITS:
        if abs(number) < 1024 or unit == _UNITS[-1]:
            break
        number /= 1024
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"


def summary(profile: Mapping[str, Any]) -> str:
    """Return a summary of a profile in one sentence."""
    if "memory" in profile:
        memory = profile["memory"]
        since = "since tracemalloc is on" if memory["was_on"] else f"within {shown(profile['seconds'])} s"
        if memory["was_ended"]:
            return "Other code has switched tracemalloc off meanwhile."
        return (
            f"The process holds {size(memory['traced_bytes'])} that it has allocated {since}, at most "
            f"{size(memory['peak_bytes'])} at a time."
        )
    ticks = profile["ticks"]
    text = (
        f"{ticks} samples in {shown(profile['seconds'])} s, every {shown(1000 * profile['interval_s'])} ms; "
        f"user code was seen {profile['busy']} times. The profiler took {100 * profile['overhead']:.1f}% of "
        "a processor."
    )
    if profile["dropped"]:
        text += f" {profile['dropped']} samples of rarer stacks are left out."
    return text


def hottest(profile: Mapping[str, Any]) -> list[tuple[int, int, str, str]]:
    """Return the functions, ordered by their own samples: own samples, samples with callees, name, place."""
    own: Counter[int] = Counter()
    total: Counter[int] = Counter()
    for numbers, count, _ in profile["stacks"]:
        own[numbers[-1]] += count
        for number in set(numbers):
            total[number] += count
    functions = profile["functions"]
    return [
        (count, total[number], functions[number][0], place(functions[number][1], functions[number][2]))
        for number, count in own.most_common()
    ]


def tables(profile: Mapping[str, Any]) -> list[Table]:
    """Return the tables of a profile."""
    if "memory" in profile:
        rows = [
            (size(held), f"{count}", size(change), place(file, line))
            for file, line, held, count, change in profile["memory"]["lines"][:MAX_ROWS]
        ]
        return [("Lines that hold memory", ("HOLDS", "BLOCKS", "CHANGE", "LINE"), rows)]
    busy = profile["busy"]
    functions = [
        (percent(own, busy), percent(total, busy), name, where)
        for own, total, name, where in hottest(profile)[:MAX_ROWS]
    ]
    lines = [
        (percent(count, busy), name, place(file, line))
        for file, line, name, count in profile["lines"][:MAX_ROWS]
    ]
    return [
        ("Functions", ("OWN", "TOTAL", "FUNCTION", "PLACE"), functions),
        ("Lines", ("TIME", "FUNCTION", "LINE"), lines),
    ]


def text(profile: Mapping[str, Any]) -> str:
    """Return a profile as text."""
    parts = [
        f"Replica {profile['replica']} on {profile['worker']}, process {profile['pid']}",
        summary(profile),
    ]
    for title, heads, rows in tables(profile):
        if rows:
            widths = [max(len(str(each)) for each in column) for column in zip(heads, *rows, strict=True)]
            body = (
                "  ".join(str(each).ljust(width) for each, width in zip(row, widths, strict=True)).rstrip()
                for row in (heads, *rows)
            )
            parts.append("\n".join([f"{title}:", *body]))
    if "stacks" in profile and not profile["busy"]:
        parts.append("No user code ran.")
    return "\n\n".join(parts)


def collapsed(profile: Mapping[str, Any]) -> str:
    """Return the stacks in the format that other tools for flame graphs read: one line for each."""
    names = [name.replace(";", ":").replace("\n", " ") for name, _, _ in profile["functions"]]
    return "".join(
        f"{';'.join(names[number] for number in numbers)} {count}\n"
        for numbers, count, _ in profile["stacks"]
    )
