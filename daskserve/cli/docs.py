"""``daskserve docs``: a section of the documentation in the terminal, from the package's own pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import click

#: Folders of the pages: in an installed package, and in a clone.
FOLDERS = (Path(__file__).parents[1] / "pages", Path(__file__).parents[2] / "docs")
#: The folder of pages that contain only directives for the site generator.
GENERATED = "api"
#: How many other sections are listed.
MAX_OTHERS = 8


class Match(IntEnum):
    """How well a section matches a keyword; the smallest value is the best match."""

    ROW = 0
    TITLE = 1
    TEXT = 2


@dataclass(frozen=True)
class Section:
    """A heading of a page, and the text below it."""

    page: str
    title: str
    text: str

    def match(self, keyword: str) -> Match | None:
        """Return how well the section matches a keyword, ignoring case; None if it does not match."""
        if self.rows(keyword):
            return Match.ROW
        if keyword.lower() in self.title.lower():
            return Match.TITLE
        return Match.TEXT if keyword.lower() in self.text.lower() else None

    def rows(self, keyword: str) -> list[str]:
        """Return the rows of tables that are about the keyword: an option, an error, a metric, a key."""
        row = re.compile(rf"\| [^|]*`{re.escape(keyword)}`", re.IGNORECASE)
        return [line for line in self.text.splitlines() if row.match(line)]

    def shown(self, keyword: str) -> str:
        """Return the heading with the rows about the keyword, or with the whole text."""
        rows = [row.strip("| ").replace(" | ", "\n  ") for row in self.rows(keyword)]
        text = "\n\n".join(rows) or self.text
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"<!-- .*? -->\n|<[a/][^>]*>", "", text))
        return f"{click.style(self.title, bold=True)} ({self.page})\n\n{plain.strip()}"


def sections(folder: Path) -> Iterator[Section]:
    """Yield the sections of all pages in a folder, without the pages that only the site's generator fills."""
    for path in sorted(each for each in folder.rglob("*.md") if each.parent.name != GENERATED):
        page, title, in_code = path.relative_to(folder).as_posix(), "", False
        lines: list[str] = []
        for line in path.read_text(encoding="utf-8").splitlines():
            in_code ^= line.lstrip().startswith("```")
            heading = None if in_code else re.match(r"#+ (.*)", line)
            if heading is None:
                lines.append(line)
                continue
            if title:
                yield Section(page, title, "\n".join(lines))
            title, lines = heading[1], []
        yield Section(page, title, "\n".join(lines))


@click.command()
@click.argument("keyword")
def docs(keyword: str) -> None:
    """Show the section of the documentation about KEYWORD.

    KEYWORD is the name of an option, error, metric or configuration key, or a word in a heading.
    """
    folder = next((each for each in FOLDERS if each.is_dir()), None)
    if folder is None:
        raise click.ClickException(
            "The pages of the documentation are not installed; install daskserve again."
        )
    matches = [(match, each) for each in sections(folder) if (match := each.match(keyword)) is not None]
    if not matches:
        raise click.ClickException(f"No section is about {keyword!r}; try a word of an error, or an option.")
    (_, best), *others = sorted(matches, key=lambda match: match[0])
    click.echo(best.shown(keyword))
    if others:
        names = [f"  {each.title} ({each.page})" for _, each in others[:MAX_OTHERS]]
        click.echo("\n".join(["\nSee also:", *names]))
