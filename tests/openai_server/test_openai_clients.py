"""Other clients of OpenAI's interface: litellm and LangChain, which take long to install and to import."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from daskserve.openai import build_app
from daskserve.testing import local_instance

PROGRAM = Path(__file__).parents[1] / "support" / "openai_clients.py"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with local_instance(http_options={"port": 0}) as client:
        client.run(build_app({"echo": {"engine": "echo_engine:Echo"}}))
        yield f"{client.http_urls()[0]}/v1"


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["litellm", "langchain_openai"])
def test_a_client_gets_what_it_expects(name: str, url: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"needs the extra clients: {name}")
    # Otherwise litellm would download a list of prices.
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), name, url],
        capture_output=True,
        text=True,
        timeout=200,
        env=environment,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
