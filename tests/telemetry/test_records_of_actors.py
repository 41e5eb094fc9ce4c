"""Records of actors: their fields in a program with its own handlers, and those of a process that crashes."""

from __future__ import annotations

import ctypes
import logging
import sys
import urllib.request
from typing import Any

import pytest
from dask_processes import PATIENCE_S, poll_for

import daskserve as serve
from daskserve.errors import ActorLostError
from daskserve.testing import local_instance


def answer(request: Any) -> str:
    logging.getLogger("mine").warning("it answers")
    return "done"


class Crashes:
    def __call__(self) -> None:
        logging.getLogger("mine").warning("it reads address zero")
        sys.stdout.write("last words\n")
        ctypes.string_at(0)


def test_records_of_an_instance_in_this_process_have_their_fields(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with local_instance(http_options={"port": 0}, logging_config={"encoding": "JSON"}) as client:
        client.run(serve.deployment(answer).bind(), name="a", route_prefix="/")
        (url,) = client.http_urls()
        request = urllib.request.Request(f"{url}/x", headers={"x-request-id": "r1"})
        urllib.request.urlopen(request, timeout=PATIENCE_S).close()
        # Its handlers get the record at once.
        (record,) = (each for each in caplog.records if each.name == "mine")
        fields = ("application", "deployment", "request_id", "route", "component_name", "instance")
        assert [vars(record)[name] for name in fields] == ["a", "answer", "r1", "/", "replica", "local"]
        poll_for(lambda: len(client.logs(application="a")) == 2)
        own, access = client.logs(application="a")
        assert (own.message, own.request_id) == ("it answers", "r1")
        assert access.access is not None
        assert access.access["status"] == 200
    logging.getLogger("mine").warning("after it")
    assert not hasattr(caplog.records[-1], "request_id")
    assert '"request_id": "r1"' in capfd.readouterr().out


def test_the_last_records_of_a_process_that_crashes_stay() -> None:
    with local_instance() as client:
        app = serve.deployment(Crashes).options(isolation="process")
        handle = client.run(app.bind(), name="a", route_prefix=None)
        with pytest.raises(ActorLostError, match="SIGSEGV"):
            handle.remote().result(PATIENCE_S)
        (lost,) = poll_for(lambda: client.status().backends["a/Crashes"].dead_replicas)
        serve.delete("a")
        records = client.logs(replica=lost.name)
    own = [each.message.partition("\n") for each in records]
    assert [first for first, _, _ in own] == [
        "it reads address zero",
        "last words",
        f"Replica {lost.name!r} is lost: its process was killed by SIGSEGV.",
    ]
    assert "in __call__" in own[-1][2]
    assert "in __call__" in "\n".join(lost.last_lines)
    assert "last words" in "\n".join(lost.last_lines)
