"""The ranges of versions in error messages begin where setup.py's do."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
LIBRARY = re.compile(r'needs\("([a-z-]+)", ">=([0-9.]+),<[0-9.]+"\)')
PYTHON = re.compile(r'needs\(PYTHON, ">=([0-9.]+),<[0-9.]+"\)')


def test_each_range_begins_with_the_lowest_version_that_setup_allows() -> None:
    modules = [
        *(ROOT / "daskserve/internals").glob("*.py"),
        ROOT / "daskserve/cluster/distributed_internals.py",
    ]
    text = "\n".join(path.read_text(encoding="utf-8") for path in modules if path.stem != "checking")
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    lowest = dict(re.findall(r'"([a-z-]+)>=([0-9.]+)', setup))
    found = LIBRARY.findall(text)
    assert len(found) + len(PYTHON.findall(text)) == len(re.findall(r"^with needs", text, re.MULTILINE))
    assert {"distributed", "tornado"} <= {library for library, _ in found}
    assert {library: version for library, version in found if lowest[library] != version} == {}
    assert set(PYTHON.findall(text)) == set(re.findall(r'python_requires=">=([0-9.]+)"', setup))
