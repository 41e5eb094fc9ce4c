"""Requests to an application while it starts for the first time, over HTTP, in one process."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pytest

import daskserve as serve
from daskserve.errors import DeployError, RequestTimeoutError
from daskserve.testing import local_instance

DEADLINE_S = 20.0


def fetch(url: str, **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("fails", [False, True])
def test_requests_to_an_application_wait_while_it_starts_for_the_first_time(
    fails: bool, tmp_path: Path
) -> None:
    go = tmp_path / "go"

    class Model:
        def __init__(self) -> None:
            until(go.exists)
            if fails:
                raise ValueError("no weights")

        def __call__(self) -> str:
            return "up"

    model = serve.deployment(max_queued_requests=2, max_constructor_retry_count=1)(Model)
    http = {"port": 0, "request_timeout_s": DEADLINE_S}
    with ThreadPoolExecutor() as threads, local_instance(http_options=http) as client:
        (url,) = client.http_urls()
        assert fetch(f"{url}/shop")[0] == 404
        client.run_many([serve.RunTarget(model.bind(), "shop", "/shop")], blocking=False)
        until(lambda: fetch(f"{url}/-/readyz")[1] == "There is no route yet.")
        timed_out = fetch(f"{url}/shop", **{"X-Request-Timeout-Seconds": "0.1"})
        waiting = {threads.submit(fetch, f"{url}/shop") for _ in range(3)}
        refused = next(as_completed(waiting))
        assert refused.result()[0] == 503
        assert "2 requests already wait for deployment 'Model' of application 'shop'" in refused.result()[1]
        assert (timed_out[0], fetch(f"{url}/else")[0], fetch(f"{url}/-/healthz")[0]) == (408, 404, 503)
        # Another application serves meanwhile, but does not answer requests for this one's route.
        client.run(serve.deployment(lambda: "else").bind(), name="else", route_prefix="/else")
        assert fetch(f"{url}/else") == (200, "else")
        assert fetch(f"{url}/-/readyz") == (503, "No replica runs of: shop/Model.")
        assert fetch(f"{url}/-/healthz")[0] == 200
        go.touch()
        answers = [each.result() for each in waiting - {refused}]
        if fails:
            assert [status for status, _ in answers] == [503, 503]
            assert all(text.endswith(" failed: its deployment failed to deploy.") for _, text in answers)
            until(lambda: fetch(f"{url}/shop")[0] == 404)
            with pytest.raises(DeployError, match="no weights"):
                client.run(model.bind(), name="shop", route_prefix="/shop")
        else:
            assert answers == [(200, "up"), (200, "up")]
        until(lambda: fetch(f"{url}/-/readyz") == (200, "success"))


def test_a_constructor_that_takes_longer_than_it_may_fails_the_deploy_of_its_application() -> None:
    class Slow:
        def __init__(self) -> None:
            time.sleep(0.5)

    slow = serve.deployment(start_timeout_s=0.1)(Slow)
    quick = serve.deployment("builtins.repr", name="quick")
    targets = [serve.RunTarget(each.bind(), each.name, f"/{each.name}") for each in (slow, quick)]
    with local_instance() as client:
        text = (
            r"^Deploying application 'Slow' failed: Replica Slow/Slow#\w+ did not start within 0.1 s: it was "
            r"still running its constructor. If it needs longer, raise start_timeout_s of its deployment.$"
        )
        with pytest.raises(RequestTimeoutError, match=text):
            client.run_many(targets)
        assert client.status().applications["quick"].status == "RUNNING"
