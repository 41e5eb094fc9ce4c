"""The code on all pages is valid, and the programs on the pages about platforms and migration work."""

from __future__ import annotations

import re
import shlex
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from daskserve.testing import local_instance

DOCS = Path(__file__).parent.parent / "docs"


def blocks(page: Path, language: str) -> list[str]:
    found = re.findall(
        rf"^( *)```{language}\n(.*?)^\1```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    return [textwrap.dedent(text) for _, text in found]


def test_every_block_can_be_read() -> None:
    """An error names its page."""
    for page in DOCS.rglob("*.md"):
        for block in blocks(page, "python"):
            flags = 0x2000 if "await " in block else 0  # ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, as in a notebook
            compile(block, str(page), "exec", dont_inherit=True, flags=flags)
        for number, block in enumerate(blocks(page, "yaml")):
            assert list(yaml.safe_load_all(block)), (page, number)


def test_the_service_beside_those_of_others_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = DOCS / "migrate/bentoml-litserve.md"
    (program,) = [each for each in blocks(page, "python") if "daskserve" in each]
    *_, (command, answer) = re.findall(r"^ *\$ (curl .*)\n *(.*)$", page.read_text(), re.MULTILINE)
    names: dict[str, Any] = {"__name__": "sums"}
    exec(program, names)
    with local_instance(http_options={"port": 0}) as client:
        client.run(names["app"], route_prefix="/predict")
        words = shlex.split(command.replace("http://127.0.0.1:8000", client.http_urls()[0]))
        ended = subprocess.run([*words, "-sS"], capture_output=True, text=True, timeout=30)
    assert (ended.stdout, ended.stderr) == (answer, "")
