"""Logs of a cluster of processes: followed in order of time, and with sinks that hang or are full."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from clusters import Load, nannied_cluster
from dask_processes import PATIENCE_S, poll_for
from distributed import Client

import daskserve as serve

pytestmark = pytest.mark.nightly

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def get(url: str) -> bytes:
    request = urllib.request.Request(url, headers={"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return bytes(answer.read())


@contextmanager
def following(address: str) -> Iterator[list[dict[str, Any]]]:
    """Yield the list of records that ``daskserve logs --follow`` fills."""
    command = [sys.executable, "-m", "daskserve", "logs", "--follow", "--json", "--address", address]
    found: list[dict[str, Any]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = process.stdout
        thread = threading.Thread(target=lambda: [found.append(json.loads(line)) for line in lines])
        thread.start()
        try:
            yield found
        finally:
            process.terminate()
            thread.join(PATIENCE_S)


def answer(request: Any) -> str:
    number = request.query_params["n"]
    logging.getLogger("mine").warning("the answer %s", number)
    sys.stdout.write(f"printed {number}\n")
    return str(number)


def test_records_of_all_processes_are_followed(tmp_path: Path) -> None:
    with nannied_cluster(2) as dask:
        client = serve.start(
            detached=True,
            dask_client=dask,
            http_options={"port": 0},
            logging_config={"logs_dir": str(tmp_path)},
        )
        for name, isolation in (("here", "thread"), ("there", "process")):
            app = serve.deployment(answer, isolation=isolation, num_replicas=2, name="d").bind()
            client.run(app, name=name, route_prefix=f"/{name}")
        (url, *_) = client.http_urls()
        with following(client.scheduler_address) as found:
            poll_for(lambda: found or get(f"{url}/here?n=first"))
            for number in range(20):
                assert get(f"{url}/{('here', 'there')[number % 2]}?n={number}") == f"{number}".encode()
                poll_for(
                    lambda number=number: any(each["message"] == f"the answer {number}" for each in found)
                )
            get(f"{url}/here?n=last")
            poll_for(lambda: any("?n=last" in each["message"] for each in found))
        answers = [each for each in found if each["message"].startswith("the answer")]
        assert [each["time"] for each in answers] == sorted(each["time"] for each in answers)
        assert len({each["message"] for each in answers}) == len(answers)
        assert {each["application"] for each in answers} == {"here", "there"}
        access = {
            each["request_id"]: each for each in found if each["component"] == "proxy" and each["access"]
        }
        for each in answers:
            assert each["trace_id"] == access[each["request_id"]]["trace_id"] == TRACE
            assert each["deployment"] == access[each["request_id"]]["deployment"] == "d"
        printed = {each["request_id"] for each in found if each["message"].startswith("printed")}
        assert printed == {each["request_id"] for each in answers}
        # A file appears with its first record.
        poll_for(lambda: set(log_files(dask)) > {str(each) for each in tmp_path.iterdir()})
        client.shutdown()


def log_files(dask: Client) -> Iterator[str]:
    """Yield the files that the details of an instance name."""
    scheduler = dask.scheduler_info()
    url = f"http://127.0.0.1:{scheduler['services']['dashboard']}/api/serve/applications/"
    details = json.loads(get(url))
    actors = [details["controller_info"], *details["proxies"].values()]
    for app in details["applications"].values():
        actors += [each for one in app["deployments"].values() for each in one["replicas"]]
    yield from (each["log_file_path"] for each in actors)


class Stuck(logging.Handler):
    """A handler that hangs."""

    def emit(self, record: logging.LogRecord) -> None:
        threading.Event().wait()


class Chatty:
    """Logs far more than its handler and its file can write."""

    def __init__(self, folder: str) -> None:
        replica = serve.get_replica_context().replica_tag.rpartition("#")[2]
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, f"replica_default_Chatty_{replica}.log").symlink_to("/dev/full")

    def __call__(self, request: Any) -> str:
        if logger := request.query_params.get("hang"):
            logging.getLogger(logger).addHandler(Stuck())
        for number in range(300):
            logging.getLogger("mine").warning("number %s", number)
        return "done"


@pytest.mark.parametrize(
    ("isolation", "logger"),
    [("thread", "mine"), ("process", "mine"), ("thread", "daskserve.access")],
)
def test_requests_notice_neither_a_full_disk_nor_a_handler_that_hangs(
    tmp_path: Path, isolation: str, logger: str
) -> None:
    def dropped(reason: str) -> float:
        text = urllib.request.urlopen(metrics, timeout=PATIENCE_S).read().decode()
        lines = [each for each in text.splitlines() if each.startswith("daskserve_log_records_dropped_total")]
        return sum(float(each.rpartition(" ")[2]) for each in lines if f'reason="{reason}"' in each)

    folder = str(tmp_path / "logs")
    with nannied_cluster(1) as dask:
        client = serve.start(
            dask_client=dask,
            http_options={"port": 0},
            logging_config={"logs_dir": folder, "output": "files", "enable_access_log": True},
        )
        (port,) = dask.run(lambda dask_worker: dask_worker.http_server.port).values()
        metrics = f"http://127.0.0.1:{port}/metrics"
        client.run(serve.deployment(Chatty, isolation=isolation).bind(folder), route_prefix="/e")
        (url,) = client.http_urls()
        with Load(url) as load:
            poll_for(lambda: dropped("file") > 1000)
            assert get(f"{url}/e?hang={logger}") == b"done"
            poll_for(lambda: dropped("queue") > 1000)
            load.more(50)
        assert load.failures == [], str(client.logs(level="error"))
        if isolation == "thread":
            (problem,) = (each for found in client.logs().problems.values() for each in found)
            assert "No space left" in problem
        # They are still in memory.
        assert client.logs(grep="number 299").records
        client.shutdown()


def test_a_file_changes_how_a_running_instance_logs(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "logging_config: {encoding: JSON}\n"
        "applications:\n- {name: a, import_path: 'served:asgi', route_prefix: /a}\n"
    )
    with nannied_cluster(2) as dask:
        client = serve.start(detached=True, dask_client=dask, http_options={"port": 0})
        (url,) = client.http_urls()
        command = [sys.executable, "-m", "daskserve", "deploy", str(file)]
        subprocess.run([*command, "--address", client.scheduler_address], check=True, timeout=PATIENCE_S)
        get(f"{url}/a?text=x")
        poll_for(lambda: client.logs(grep="GET /a?text=x").records)
        assert client.logs(grep="CALL").records == ()
        client.shutdown()
