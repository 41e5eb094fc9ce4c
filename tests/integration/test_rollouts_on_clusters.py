"""A rollout on a real cluster, under load over HTTP, with the command line beside it."""

from __future__ import annotations

import itertools
import json
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from dask_processes import ExternalCluster, poll_for

import daskserve as serve
from daskserve.cli.main import main

PLAN = {"steps": ["25%", "100%"], "pause_s": 3600, "sticky": "header:X-Session"}


def version(name: str, *, fails: bool = False, **options: Any) -> Any:
    class Answer:
        async def __call__(self, request: Any) -> str:
            return str(1 // 0) if fails else name

    deployment: Any = serve.deployment(name="m", version=name, **options)
    return deployment(Answer).bind()


@pytest.mark.nightly
def test_a_faulty_version_is_rolled_back_within_ten_seconds(clean_cluster: ExternalCluster) -> None:
    with (
        serve.start(address=clean_cluster.address, http_options={"port": 0}) as client,
        httpx.Client(base_url=client.http_urls()[0]) as http,
    ):

        def ask(**headers: str) -> tuple[int, str]:
            response = http.get("/", headers=headers)
            return response.status_code, response.text

        def command(*arguments: str) -> Any:
            where = ("-a", clean_cluster.address, "--instance", client.instance_name, "--json")
            found = CliRunner().invoke(main, ["rollout", *arguments, "m", *where])
            assert found.exit_code == (1 if "ROLLED_BACK" in found.stdout else 0), found.output
            return json.loads(found.stdout)

        client.run(version("1"))
        client.run(version("2", rollout=PLAN))
        named = {name: ask(**{"X-Serve-Version": name}) for name in ("candidate", "stable", "2", "1")}
        assert named == {"candidate": (200, "2"), "stable": (200, "1"), "2": (200, "2"), "1": (200, "1")}
        assert ask(**{"X-Serve-Version": "3"})[0] == 404
        by_session = {str(n): ask(**{"X-Session": str(n)}) for n in range(40)}
        assert {text for _, text in by_session.values()} == {"1", "2"}
        assert by_session == {each: ask(**{"X-Session": each}) for each in by_session}
        poll_for(lambda: client.rollout_status("m")["requests"]["candidate"]["ended"], what="no counts")
        assert command("promote", "--full")["state"] == "COMPLETED"
        poll_for(lambda: {ask() for _ in range(10)} == {(200, "2")}, what="the old version answers")

        client.run(version("3", fails=True, rollout=PLAN))
        for n in itertools.count():
            ask()
            if n % 20 == 0 and client.rollout_status("m")["state"] == "ROLLED_BACK":
                break
        assert command("status")["version"] == "3"
        assert {ask() for _ in range(20)} == {(200, "2")}
        found = client.status().applications["default"]
        assert "Version '3' was rolled back, and version '2' has all traffic" in found.message
