"""A hook of MkDocs that adds pages from outside docs/ to the site, and rewrites links.

README.md is the site's first page. The notebooks in examples/ are pages, too, with their saved outputs. A
link such as ``../SECURITY.md#secrets`` works in the repository, and is rewritten to the page of the site. A
link to a file that is not a page, such as an example, becomes plain text.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
#: Pages of the site outside docs/, by their paths in the repository.
OUTSIDE = {
    "README.md": "index.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples/digits/README.md": "digits.md",
    "examples/chat/README.md": "chat.md",
}
NOTEBOOKS = ROOT / "examples/notebooks"
LINK = re.compile(r"(?<!!)\[([^\]\[]*)\]\(([^)\s#]+)((?:#[^)\s]*)?)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for notebook in sorted(NOTEBOOKS.glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=notebook_page(notebook)))
    return files


def notebook_page(notebook: Path) -> str:
    """Return a notebook as Markdown: its texts, its code, and its saved outputs."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    parts = []
    for cell in cells:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += map(shown_output, cell.get("outputs", ()))
    return "\n\n".join(parts) + f"\n\nThe notebook: `{notebook.relative_to(ROOT)}`\n"


def shown_output(output: dict[str, Any]) -> str:
    data = output.get("data", {"text/plain": output.get("text", ())})
    for kind in ("image/svg+xml", "text/html"):
        if kind in data:
            return "".join(data[kind])
    return "```text\n" + "".join(data["text/plain"]).rstrip() + "\n```"


def site_path(path: str) -> str:
    """Return the site's path of a file in the repository, or "" if it is not part of the site."""
    if path.endswith(".ipynb"):
        return f"notebooks/{Path(path).stem}.md"
    return OUTSIDE.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else "")


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    here = page.file.src_uri
    source = next((path for path, name in OUTSIDE.items() if name == here), f"docs/{here}")

    def rewritten(link: re.Match[str]) -> str:
        text, target, anchor = link.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if "://" in target or target.startswith("mailto:") or not (ROOT / path).exists():
            return link.group(0)
        found = site_path(path)
        return (
            f"[{text}]({posixpath.relpath(found, posixpath.dirname(here) or '.')}{anchor})" if found else text
        )

    # Code is not changed.
    parts = re.split(r"(^ *```.*?^ *```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if index % 2 else LINK.sub(rewritten, part) for index, part in enumerate(parts))
