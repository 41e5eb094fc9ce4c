"""Each kind of file in Ray Serve's documentation deploys and answers on a real cluster."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from dask_processes import ExternalCluster, fetch
from ray_files import KINDS

import daskserve as serve
from daskserve.config_file.reading import read

HERE = str(Path(__file__).parent.parent / "support")


@pytest.mark.nightly
def test_each_kind_deploys_and_answers(external: ExternalCluster) -> None:
    external.client.run(_find_programs, HERE)
    with serve.start(dask_client=external.client, http_options={"port": 0}) as client:
        for name, kind in KINDS.items():
            if kind.lacks:
                continue
            version = client.deploy_config(read(kind.text, f"{name}.yaml").config)
            for app, found in client.wait_for_config(version, timeout_s=30).items():
                expected = "DEPLOY_FAILED" if app in kind.fails else "RUNNING"
                assert found["status"] == expected, (name, found)
                assert kind.fails.get(app, "") in found["message"]
            (url,) = client.http_urls()
            for path, (sent, answer) in kind.answers.items():
                body = None if sent is None else json.dumps(sent).encode()
                method = "GET" if body is None else "POST"
                assert fetch(f"{url}{path}", method, body=body, timeout_s=10).text == answer, name


def _find_programs(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)
