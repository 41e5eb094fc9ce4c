"""Tables in a document that are generated from code, each between two comments."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class GeneratedTables:
    """The generated tables of one kind in a document.

    Attributes
    ----------
    document : str
        Path of the document, relative to the project's folder.
    opening : str
        Regular expression for the comment before a table; its groups are the arguments of ``make``.
    make : callable
        Returns the table as Markdown.
    """

    document: str
    opening: str
    make: Callable[..., str]

    def rendered(self, text: str) -> str:
        """Return the text with every table regenerated."""
        tables = re.compile(rf"(?P<head><!-- {self.opening} -->\n).*?(?P<end><!-- end -->)", re.DOTALL)

        def regenerate(match: re.Match[str]) -> str:
            head, *captured, end = match.groups()
            return head + self.make(*captured) + end

        return tables.sub(regenerate, text)

    def main(self) -> int:
        """Rewrite the document, or with ``--check`` return 1 if it is not up to date."""
        path = Path(__file__).parent.parent / self.document
        text = path.read_text()
        new = self.rendered(text)
        if "--check" in sys.argv:
            return int(new != text)
        path.write_text(new)
        return 0
