"""The REST API on the HTTP server of a real scheduler, whose workers import what a request deploys."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from dask_processes import ExternalCluster, Reply, fetch, poll_for
from scraping import dashboard

import daskserve as serve

CODE = """
import daskserve as serve


@serve.deployment
def answer(request):
    return "one"


app = answer.bind()
"""


def test_a_request_deploys_what_workers_import_and_others_see_it(
    external: ExternalCluster, tmp_path: Path
) -> None:
    module = f"rest_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{module}.py").write_text(CODE)
    external.client.run(_find_modules, str(tmp_path))
    file: dict[str, Any] = {"applications": [{"name": "shop", "import_path": f"{module}:app"}]}

    def ask(path: str, method: str = "GET", body: Any = None, **headers: str) -> Reply:
        named = {name.replace("_", "-"): each for name, each in headers.items()}
        data = None if body is None else json.dumps(body).encode()
        return fetch(f"{dashboard(external.client)}{path}", method, body=data, headers=named, timeout_s=30)

    with serve.start(dask_client=external.client, http_options={"port": 0}) as client:
        client.deploy_config(read_file(file))
        assert client.wait_for_config(1, timeout_s=30)["shop"]["status"] == "RUNNING"
        (url,) = client.http_urls()
        assert fetch(url).text == "one"
        found = ask("/api/serve/applications/")
        shop = found.json["applications"]["shop"]
        assert (found.status, shop["source"], shop["status"]) == (200, "declarative", "RUNNING")

        (tmp_path / f"{module}.py").write_text(CODE.replace('"one"', '"two"'))
        reply = ask("/api/serve/applications/", "PUT", file, If_Match='"1"', Content_Type="application/json")
        assert (reply.status, reply.json["version"]) == (200, 2)
        poll_for(lambda: fetch(url).text == "two", 30, what="the new code does not serve")
        assert ask("/api/serve/applications/", "PUT", file, If_Match='"1"').status == 412
        wrong = {"applications": [{"name": "shop", "import_pth": "x:y"}, {"nam": "b"}]}
        assert ask("/api/serve/applications/", "PUT", wrong).json["message"].count("body.yaml:1:") >= 3
        kinds = {each["kind"] for each in ask("/api/serve/events").json["events"]}
        assert "DEPLOYING" in kinds
        assert ask("/api/serve/applications/shop", "DELETE").status == 200
        poll_for(lambda: fetch(url).status == 404, 30, what="the application stays")
        # While its replicas end, a second DELETE is accepted, too.
        gone = partial(ask, "/api/serve/applications/shop", "DELETE")
        poll_for(lambda: gone().status == 404, 30, what="the application stays in the records")


def _find_modules(folder: str) -> None:
    import sys

    sys.path.insert(0, folder)


def read_file(values: Any) -> Any:
    from daskserve.config_file.reading import read

    return read(json.dumps(values), "serve.json").config
