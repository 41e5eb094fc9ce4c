"""The programs on the pages about SSH and job queues work on clusters of this machine."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from dask_processes import Program, fetch, poll_for
from ports import free_port

PLATFORMS = Path(__file__).parents[2] / "docs/platforms"
SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin")
APPLICATION = """
import daskserve as serve

@serve.deployment(num_replicas=2)
def hello(request):
    return "hello"

app = hello.bind()
"""

pytestmark = pytest.mark.nightly


def programs(page: str) -> list[str]:
    text = (PLATFORMS / page).read_text(encoding="utf-8")
    found = re.findall(r"^( *)```python\n(.*?)^\1```$", text, re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(program) for _, program in found]


def replaced(program: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        assert old in program, old
        program = program.replace(old, new)
    return program


def serves(program: str, folder: Path) -> None:
    """Run a program until it answers; interrupt it, and check that it ends."""
    port = free_port()
    (folder / "served.py").write_text(program)
    running = Program(["served.py"], folder, environment={"DASK_DASKSERVE__HTTP__PORT": str(port)})
    try:
        poll_for(lambda: "Serving at" in running.output, 60, what=running.report)
        assert fetch(f"http://127.0.0.1:{port}/").text == "hello"
        running.interrupt()
        assert running.wait() == 0, running.report()
    finally:
        running.kill()


@pytest.fixture
def ssh_port(tmp_path: Path) -> Iterator[int]:
    """An SSH server on loopback that accepts the key in ``tmp_path``."""
    if SSHD is None:
        pytest.skip("Debian's package openssh-server is not installed")
    port = free_port()
    for name in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)]
        subprocess.run(command, check=True, timeout=30)
    options = {
        "Port": str(port),
        "ListenAddress": "127.0.0.1",
        "HostKey": str(tmp_path / "host"),
        "AuthorizedKeysFile": str(tmp_path / "user.pub"),
        "StrictModes": "no",
        "UsePAM": "no",
        "PidFile": "none",
    }
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    flags = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    server = subprocess.Popen([SSHD, "-D", "-e", "-f", "/dev/null", *flags], stderr=subprocess.DEVNULL)
    try:
        poll_for(lambda: _accepts(port), 10)
        yield port
    finally:
        server.kill()
        server.wait()


def _accepts(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def test_the_program_serves_on_an_ssh_cluster(tmp_path: Path, ssh_port: int) -> None:
    pytest.importorskip("asyncssh")
    connect = {"port": ssh_port, "client_keys": [str(tmp_path / "user")], "known_hosts": None}
    (program,) = programs("ssh.md")
    changes = {
        '"node-1", "node-1", "node-2"': ", ".join(['"127.0.0.1"'] * 3),
        "worker_options": f"connect_options={connect!r}, worker_options",
    }
    serves(replaced(program, changes), tmp_path)


def test_the_program_serves_on_workers_of_jobs(tmp_path: Path) -> None:
    """Uses the cluster of dask-jobqueue whose jobs are processes of this machine, without a shell."""
    pytest.importorskip("dask_jobqueue")
    cluster, _, program = programs("slurm.md")
    cluster = replaced(
        cluster,
        {
            "from dask_jobqueue import SLURMCluster": "from dask_jobqueue.local import LocalCluster",
            "SLURMCluster(": "LocalCluster(",
            "cores=4": "cores=2",
            "16GB": "2GB",
            '    walltime="08:00:00",\n': "",
        },
    )
    cluster = re.sub(r"    (job_extra_directives|job_script_prologue|python)=.*\n", "", cluster)
    serves(APPLICATION + cluster + program, tmp_path)
