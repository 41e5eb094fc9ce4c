"""Plain tables for terminals."""

from __future__ import annotations

from collections.abc import Sequence

#: Characters between two columns.
GAP = "  "


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows as aligned columns below their names; columns without any value are left out."""
    kept = [column for column in range(len(head)) if any(row[column] for row in rows)]
    lines = [[each[column] for column in kept] for each in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        GAP.join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
