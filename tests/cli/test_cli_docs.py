"""``daskserve docs`` shows the section about a keyword."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from tables import each_case

from daskserve.cli import docs as cli_docs
from daskserve.cli.docs import docs

PAGE = """# Options

About `max_surge`.

| option | meaning |
| --- | --- |
| `max_surge` or `max_surge_percent` | how many [more](x.md) |
| `port` | the port |

## Draining

```python
# no heading
```

A worker drains.
"""


@pytest.fixture(autouse=True)
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "options.md").write_text(PAGE)
    (tmp_path / "api").mkdir()
    (tmp_path / "api/draining.md").write_text("# Draining\n\n::: a.directive.of.the.site\n")
    monkeypatch.setattr(cli_docs, "FOLDERS", (tmp_path / "absent", tmp_path))
    return tmp_path


@each_case(
    ("keyword", "output"),
    [
        ("MAX_SURGE", "Options (options.md)\n\n`max_surge` or `max_surge_percent`\n  how many more\n"),
        ("drain", "Draining (options.md)\n\n```python\n# no heading\n```\n\nA worker drains.\n"),
        ("worker", "Draining (options.md)\n\n```python\n# no heading\n```\n\nA worker drains.\n"),
    ],
)
def test_a_keyword_finds_its_row_or_section(keyword: str, output: str) -> None:
    found = CliRunner().invoke(docs, [keyword])
    assert (found.exit_code, found.output) == (0, output)


def test_other_sections_are_listed(pages: Path) -> None:
    (pages / "z.md").write_text("# Drains\n\nText.\n")
    assert CliRunner().invoke(docs, ["drain"]).output.endswith("\nSee also:\n  Drains (z.md)\n")


def test_an_unknown_keyword_is_an_error() -> None:
    found = CliRunner().invoke(docs, ["teapot"])
    assert (found.exit_code, found.output) == (
        1,
        "Error: No section is about 'teapot'; try a word of an error, or an option.\n",
    )


def test_the_pages_of_the_clone_have_every_error() -> None:
    clone = Path(__file__).parents[2] / "docs"
    (section,) = [each for each in cli_docs.sections(clone) if each.page == "errors.md"]
    assert section.rows("NoCapacityError")
