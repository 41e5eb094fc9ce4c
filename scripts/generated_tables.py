"""Tables of a document that are made from code, each between two comments, so that they can be made anew."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class GeneratedTables:
    """The tables of one kind in a document.

    Attributes
    ----------
    document : str
        Where it is below the project's folder.
    opening : str
        Matches the text of the comment that a table follows; what it captures is given to ``make``.
    make : callable
        Returns the table as Markdown.
    """

    document: str
    opening: str
    make: Callable[..., str]

    def rendered(self, text: str) -> str:
        """Return the text with every table made anew."""
        tables = re.compile(rf"(?P<head><!-- {self.opening} -->\n).*?(?P<end><!-- end -->)", re.DOTALL)

        def anew(match: re.Match[str]) -> str:
            head, *captured, end = match.groups()
            return head + self.make(*captured) + end

        return tables.sub(anew, text)

    def main(self) -> int:
        """Rewrite the document, or with ``--check`` return 1 if it is not up to date."""
        path = Path(__file__).parent.parent / self.document
        text = path.read_text()
        new = self.rendered(text)
        if "--check" in sys.argv:
            return int(new != text)
        path.write_text(new)
        return 0
