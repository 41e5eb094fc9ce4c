"""Pages of the site are linked with each other, and `make docs` builds them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import unicodedata
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
OUTSIDE = ("README.md", "SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md")
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / each for each in OUTSIDE)])


def without_code(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)


@cache
def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as Markdown's table of contents makes them."""
    found = set()
    for title in re.findall(r"^#+ (.*)$", without_code(path.read_text(encoding="utf-8")), re.MULTILINE):
        plain = unicodedata.normalize("NFKD", re.sub(r"[`*]", "", title)).encode("ascii", "ignore").decode()
        found.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower()))
    return found


def test_every_link_leads_somewhere() -> None:
    wrong = []
    for page in PAGES:
        text = without_code(page.read_text(encoding="utf-8"))
        for target, anchor in re.findall(r"\]\(([^)\s#]*)#?([^)\s]*)\)", text):
            if "://" in target or target.startswith("mailto:"):
                continue
            path = (page.parent / target).resolve() if target else page
            if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
                wrong.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert wrong == []


def test_every_page_is_in_the_navigation() -> None:
    def pages(part: object) -> list[str]:
        if isinstance(part, str):
            return [part]
        parts = part.values() if isinstance(part, dict) else part
        return [each for one in parts for each in pages(one)]  # type: ignore[attr-defined]

    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = pages(settings["nav"])
    assert len(listed) == len(set(listed))
    assert {str(each.relative_to(ROOT / "docs")) for each in (ROOT / "docs").rglob("*.md")} <= set(listed)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mkdocstrings") is None, reason="needs the extra docs")
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "true"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (loaded,) = {
        bool(
            re.search(r'<(?:script|link)[^>]*(?:src|href)="(?:https?:)?//', page.read_text(encoding="utf-8"))
        )
        for page in (tmp_path / "site").glob("*.html")
    }
    assert not loaded, "a page loads something from the network"
