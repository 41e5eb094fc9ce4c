"""Instances and clusters end with their program, however it ends, unless they are detached."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from dask_processes import ExternalCluster, Program, alive, fetch, is_listening, poll_for, wait_until_gone

import daskserve as serve

#: Starts an instance, prints its addresses, and ends in the way that standard input requests.
SERVING = """
import sys
import daskserve as serve

client = serve.start({arguments}, http_options={{"port": 0}}, dashboard=False)
client.create_backend("echo", lambda request: "here")
client.create_endpoint("echo", backend="echo", route="/echo")
print("scheduler", client.scheduler_address, flush=True)
print("url", client.http_urls()[0], flush=True)
if sys.stdin.readline() == "raise\\n":
    raise RuntimeError("an error of the program")
"""

CONNECTING = """
import sys
import daskserve as serve

client = serve.connect(address=sys.argv[1])
print("answer", client.get_handle("echo").remote().result(), flush=True)
client.shutdown()
"""

#: The line or the signal that the program gets, and its exit status.
ENDS = [
    pytest.param("exit", 0, id="exits", marks=pytest.mark.nightly),
    pytest.param("raise", 1, id="raises", marks=pytest.mark.nightly),
    pytest.param(signal.SIGINT, -signal.SIGINT, id="SIGINT", marks=pytest.mark.nightly),
    pytest.param(signal.SIGTERM, -signal.SIGTERM, id="SIGTERM", marks=pytest.mark.nightly),
    pytest.param(signal.SIGKILL, -signal.SIGKILL, id="SIGKILL"),
]
SUDDEN = (signal.SIGTERM, signal.SIGKILL)


@contextmanager
def serving(program: Program) -> Iterator[str]:
    """Yield the URL at which a program serves."""
    try:
        url = program.wait_for_line("url ")
        assert fetch(f"{url}/echo").text == "here"
        yield url
    finally:
        program.kill()


def end(program: Program, how: str | signal.Signals, status: int) -> None:
    if how is signal.SIGINT:
        program.interrupt()
    elif isinstance(how, signal.Signals):
        program.process.send_signal(how)
    else:
        program.write_line(how)
    assert program.wait(10) == status, program.report()
    if how == "exit":
        assert program.errors == ""


# For an external cluster, a death by SIGTERM and one by SIGKILL look the same.
@pytest.mark.parametrize(("how", "status"), [*ENDS[:3], ENDS[-1]])
def test_an_instance_ends_with_its_program(
    how: str | signal.Signals, status: int, external: ExternalCluster
) -> None:
    """On an external cluster: at once if the program shuts it down, otherwise after the grace period."""
    program = external.run_program(SERVING.format(arguments="address=sys.argv[1]"))
    with serving(program) as url:
        end(program, how, status)
    limit_s = 10 if how in SUDDEN else 2
    poll_for(lambda: not is_listening(url), limit_s, every_s=0.1)
    external.assert_clean(limit_s, topics=False)


@pytest.mark.parametrize(("how", "status"), [ENDS[0], *ENDS[2:]])
def test_a_local_cluster_ends_with_its_program(
    how: str | signal.Signals, status: int, tmp_path: Path
) -> None:
    """No process is left, however the program ended."""
    program = Program(["-c", SERVING.format(arguments="False")], tmp_path, keeps_stdin=True)
    with serving(program) as url:
        started = program.descendants()
        assert len(started) >= 2
        end(program, how, status)
        wait_until_gone(started, 5)
    assert not is_listening(url)


@pytest.mark.nightly
def test_a_detached_instance_outlives_its_creator(external: ExternalCluster) -> None:
    """Another process connects to it with ``connect`` and shuts it down."""
    source = SERVING.format(arguments="detached=True, address=sys.argv[1]")
    creator = external.run_program(source, DASK_DASKSERVE__TIMEOUTS__GRACE_S="0.2")
    with serving(creator) as url:
        end(creator, "exit", 0)
    # Far longer than an instance that is not detached would exist.
    until = time.monotonic() + 1
    while time.monotonic() < until:
        assert fetch(f"{url}/echo").text == "here"
    other = external.run_program(CONNECTING)
    assert other.wait() == 0, other.report()
    assert (other.output, other.errors) == ("answer here\n", "")
    assert not is_listening(url)


@pytest.mark.nightly
def test_a_detached_cluster_outlives_its_creator(tmp_path: Path) -> None:
    """A detached start without a cluster creates one that stays until the instance is shut down."""
    creator = Program(["-c", SERVING.format(arguments="detached=True")], tmp_path, keeps_stdin=True)
    with serving(creator) as url:
        address = creator.wait_for_line("scheduler ")
        started = creator.descendants()
        try:
            end(creator, signal.SIGKILL, -signal.SIGKILL)
            assert len(alive(started)) == len(started) >= 3
            assert fetch(f"{url}/echo").text == "here"
            other = Program(["-c", CONNECTING, address], tmp_path)
            assert other.wait() == 0, other.report()
            assert (other.output, other.errors) == ("answer here\n", "")
        finally:
            wait_until_gone(started, 5)
    assert not is_listening(url)


BLOCKING = """
import daskserve as serve

@serve.deployment
def echo(request):
    return "here"

client = serve.start(http_options={"port": 0}, dashboard=False)
print("url", client.http_urls()[0], flush=True)
serve.run(echo.bind(), route_prefix="/echo", blocking=True)
print("ended", flush=True)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_blocking_run_shuts_down_on_a_signal(number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C and the signal of a process manager are the regular ways to end it."""
    program = Program(["-c", BLOCKING], tmp_path)
    try:
        url = program.wait_for_line("url ")
        poll_for(lambda: fetch(f"{url}/echo").text == "here")
        poll_for(lambda: "replica runs" in program.output)  # by now it handles signals
        started = program.descendants()
        if number is signal.SIGINT:
            program.interrupt()
        else:
            program.process.send_signal(number)
        assert program.wait(10) == 0, program.report()
        assert f"Serving at {url}. Press Ctrl-C to stop." in program.output
        assert "echo: HEALTHY, 1 of 1 replica runs (at /echo)" in program.output
        assert program.output.endswith("ended\n")
        assert program.errors == ""
        wait_until_gone(started, 2)
    finally:
        program.kill()


@pytest.mark.nightly
def test_an_instance_can_be_restarted_after_another_program_ended_it(external: ExternalCluster) -> None:
    """After another program ends a detached instance, the first program can start and end a new one."""
    for text in ("first", "second"):
        client = serve.start(detached=True, http_options={"port": 0}, dask_client=external.client)
        client.create_backend("echo", lambda request, text=text: text)
        client.create_endpoint("echo", backend="echo", route="/echo")
        handle = client.get_handle("echo")
        assert handle.remote().result(10) == text
        assert fetch(f"{client.http_urls()[0]}/echo").text == text
        other = external.run_program(CONNECTING)
        assert other.wait() == 0, other.report()
        assert other.output == f"answer {text}\n"
        with pytest.raises(serve.errors.ServeError, match="has been shut down"):
            handle.remote().result(10)


#: Leaves the Dask client, and with it the cluster, while an instance runs.
LEAVING = """
from distributed import Client
import daskserve as serve

if __name__ == "__main__":
    with Client(n_workers=2, threads_per_worker=1, dashboard_address=":0"):
        echo = serve.deployment(name="echo")(lambda value: value)
        handle = serve.run(echo.bind(), http_options={"port": 0})
        print("answer", handle.remote(1).result(), flush=True)
    print("left", flush=True)
"""


@pytest.mark.nightly
def test_a_program_that_leaves_its_dask_client_prints_nothing_of_daskserve(tmp_path: Path) -> None:
    script = tmp_path / "leaving.py"
    script.write_text(LEAVING)
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert ended.stdout.split() == ["answer", "1", "left"], ended.stderr
    assert ended.returncode == 0
    for complaint in ("Closed comm", "did not start", "did not end cleanly"):
        assert complaint not in ended.stderr


#: Ends while the scheduler has not answered a heartbeat.
SLOW_HEARTBEATS = """
import asyncio, threading
from distributed import default_client
import daskserve as serve
from daskserve.cluster.dask.connection import connection_of

client = serve.start(http_options={"location": "NoServer"}, dashboard=False)
handlers = connection_of(default_client()).started.cluster.scheduler.handlers
answer, asked = handlers["heartbeat_worker"], threading.Event()

async def slow(**message):
    asked.set()
    await asyncio.sleep(0.5)
    return answer(**message)

handlers["heartbeat_worker"] = slow
asked.wait()
client.shutdown()
print("ended", flush=True)
"""


@pytest.mark.nightly
def test_a_local_cluster_ends_without_cutting_off_a_heartbeat(tmp_path: Path) -> None:
    program = Program(["-c", SLOW_HEARTBEATS], tmp_path)
    try:
        assert program.wait() == 0, program.report()
        assert (program.output, program.errors) == ("ended\n", "")
    finally:
        program.kill()


#: A forked process calls an inherited handle, then a handle of its own connection, and exits.
FORKING = """
import os
import sys
import daskserve as serve

@serve.deployment
def double(number):
    return 2 * number

handle = serve.run(double.bind(), route_prefix=None)
child = os.fork()
if not child:
    try:
        handle.remote(1).result(30)
    except serve.errors.ClusterUnreachableError as error:
        address = str(error).split("address='")[1].split("'")[0]
    with serve.connect(address=address) as client:
        assert client.get_handle("double").remote(2).result(30) == 4
    sys.exit(3)
print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
print("answer", handle.remote(4).result(30), flush=True)
"""


def test_a_forked_process_connects_again_and_exits(tmp_path: Path) -> None:
    """The threads of its parent's connection are missing there, so nothing may wait for them."""
    program = Program(["-c", FORKING], tmp_path)
    try:
        assert program.wait(30) == 0, program.report()
        assert program.output == "status 3\nanswer 8\n"
    finally:
        program.kill()


#: Starts and ends an instance again and again, and prints what is left of each in this process.
CYCLING = """
import gc, os, threading
import dask
import daskserve as serve

dask.config.set({"daskserve.local-cluster": {"n-workers": 1, "threads-per-worker": 1}})
options = {"http_options": {"location": "NoServer"}, "dashboard": False}

def blocking():
    with serve.start(**options):
        pass

def detached():
    serve.start(detached=True, **options).shutdown()

def left():
    gc.collect()
    loops = sum(each.name == "IO loop" for each in threading.enumerate())
    return loops, len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0

blocking()
_, before = left()
for cycle in (blocking, detached):
    cycle()
    loops, files = left()
    print(loops, files - before, flush=True)
"""


@pytest.mark.nightly
def test_instances_and_their_clusters_leave_no_thread_and_no_descriptor(tmp_path: Path) -> None:
    program = Program(["-c", CYCLING], tmp_path)
    try:
        assert program.wait(50) == 0, program.report()
        assert program.output == "0 0\n" * 2
    finally:
        program.kill()
