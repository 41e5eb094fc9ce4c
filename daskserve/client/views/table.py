"""Tables for terminals and notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TypeAlias

#: The names of the columns, and the rows.
Table: TypeAlias = tuple[Sequence[str], Sequence[Sequence[str]]]
#: Characters between two columns.
GAP = "  "


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows as aligned columns below their names; columns without any value are left out."""
    lines = _lines(head, rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        GAP.join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the same as HTML, with escaped values."""
    first, *others = _lines(head, rows)
    body = "".join(_html_row("td", each) for each in others)
    return f"<table><thead>{_html_row('th', first)}</thead><tbody>{body}</tbody></table>"


def _html_row(tag: str, cells: Sequence[str]) -> str:
    inner = "".join(f'<{tag} style="text-align: left">{escape(each)}</{tag}>' for each in cells)
    return f"<tr>{inner}</tr>"


def _lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the columns that have a value, with their names first."""
    kept = [column for column in range(len(head)) if any(row[column] for row in rows)]
    return [[each[column] for column in kept] for each in (head, *rows)]
