"""``daskserve run`` serves from a shell, and leaves nothing behind."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from clusters import Load
from dask_processes import (
    ExternalCluster,
    Program,
    fetch,
    is_listening,
    listener,
    poll_for,
    wait_until_gone,
)

#: The installed command; its folder is not the project's.
COMMAND = str(Path(sys.executable).with_name("daskserve"))
#: The folder of Dask's workers.
SCRATCH = "dask-scratch-space"

SHOP = """
import os
import time
import daskserve as serve
from fastapi import FastAPI
from prices import PRICE

with open("imports", "a") as file:
    file.write(f"{os.getpid()}\\n")
app = FastAPI()

@serve.deployment(isolation="process")
@serve.ingress(app)
class Shop:
    def __init__(self, factor):
        self.factor = factor
        open("begun", "w").close()
        while not os.path.exists("go"):
            time.sleep(0.01)

    @app.get("/price")
    def price(self):
        return [PRICE * self.factor, os.getpid()]

def build(args):
    return Shop.bind(int(args["factor"]))
"""

ASGI = """
import os

with open("imports", "a") as file:
    file.write(f"{os.getpid()}\\n")

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})
"""


#: Holds a port for as long as it runs.
HOLDER = """
import socket
from contextlib import asynccontextmanager
from fastapi import FastAPI

@asynccontextmanager
async def lifespan(app):
    with socket.create_server(("127.0.0.1", {port})):
        yield

app = FastAPI(lifespan=lifespan)

@app.get("/")
def root():
    return "{answer}"
"""


@contextmanager
def run(folder: Path, *arguments: str) -> Iterator[Program]:
    temporary = folder / "temporary"
    temporary.mkdir()
    program = Program([COMMAND, "run", *arguments], folder, environment={"TMPDIR": str(temporary)})
    try:
        yield program
    finally:
        program.kill()
    # Dask keeps a folder with locks, which all clusters of a user share.
    assert [each.name for each in temporary.rglob("*") if each.suffix != ".lock"] in ([], [SCRATCH])


def url_of(program: Program) -> str:
    program.wait_for_line("Started a Dask cluster at tcp://127.0.0.1:")
    return serving_at(program)


def serving_at(program: Program) -> str:
    def find() -> str | None:
        assert program.process.poll() is None, program.report()
        _, found, rest = program.output.partition("Serving at ")
        return rest.partition(". Press")[0] if found and ". Press" in rest else None

    return str(poll_for(find, what=program.report))


def test_a_project_is_served_from_its_folder_until_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "prices.py").write_text("PRICE = 7")
    with listener() as port:
        pass  # it is free from now on
    arguments = ("shop:build", "factor=3", "--port", str(port), "--route-prefix", "/api")
    with run(tmp_path, *arguments) as program:
        poll_for((tmp_path / "begun").exists, what=program.report)
        assert not is_listening(f"http://127.0.0.1:{port}"), "the port opens once the application is up"
        (tmp_path / "go").touch()
        url = url_of(program)
        price, pid = fetch(f"{url}/api/price").json
        processes = program.descendants()
        assert (url, price) == (f"http://127.0.0.1:{port}", 21)
        assert pid in [each.pid for each in processes]
        (importer,) = (tmp_path / "imports").read_text().split()
        assert int(importer) in [each.pid for each in processes], "a worker has imported the module, once"
        program.interrupt()
        assert program.wait() == 0, program.report()
        wait_until_gone(processes, 5)
        assert program.errors == ""


def test_a_cluster_by_address_gets_an_instance_that_ends_on_sigterm(
    tmp_path: Path, external: ExternalCluster
) -> None:
    with run(tmp_path, "served:asgi", "--port", "0", "--address", external.address) as program:
        assert fetch(f"{serving_at(program)}/a/path").text == "/a/path"
        program.process.send_signal(signal.SIGTERM)
        assert program.wait() == 0, program.report()
        assert program.errors == ""
    external.assert_clean(topics=False)


@pytest.mark.nightly
def test_an_application_is_imported_only_where_it_runs(tmp_path: Path) -> None:
    """Also if it is deployed by its path; and a failed start ends everything."""
    (tmp_path / "shop.py").write_text(ASGI)
    with run(tmp_path, "shop:app", "--port", "0") as program:
        assert fetch(f"{url_of(program)}/x").text == "hello"
        (importer,) = (tmp_path / "imports").read_text().split()
        processes = program.descendants()
        assert int(importer) in [each.pid for each in processes]
        program.process.send_signal(signal.SIGTERM)
        assert program.wait() == 0, program.report()
        assert "Stopping (SIGTERM)." in program.output
        wait_until_gone(processes, 5)
        assert program.errors == ""


def test_a_port_in_use_is_reported_at_once(tmp_path: Path) -> None:
    with listener() as port, run(tmp_path, "nowhere:app", "--port", str(port)) as program:
        assert program.wait() == 1, program.report()
        assert program.output == ""
        assert program.errors.startswith(f"Error: 127.0.0.1:{port} is in use by another program")
        assert program.errors.endswith("choose another port with --port; 0 takes a free one.\n")


def test_a_saved_file_is_served_on_the_same_port(tmp_path: Path) -> None:
    def save(text: str) -> None:
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").replace(tmp_path / "shop.py")

    save(ASGI)
    with run(tmp_path, "shop:app", "--port", "0", "--reload") as program:
        url = url_of(program)
        with Load(url, "/") as load:
            save(ASGI.replace("hello", "moved"))
            poll_for(lambda: fetch(url).text == "moved", what=program.report)
            save(ASGI.replace("import os", "import os os"))
            poll_for(lambda: "SyntaxError: invalid syntax" in program.output, what=program.report)
            assert fetch(url).text == "moved"
            save(ASGI.replace("hello", "again"))
            poll_for(lambda: fetch(url).text == "again", what=program.report)
            load.more()
        assert load.failures == []
        program.interrupt()
        assert program.wait() == 0, program.report()
        assert program.output.count("Reloaded.") == 2


@pytest.mark.nightly
def test_code_that_holds_a_port_ends_before_its_successor_starts(tmp_path: Path) -> None:
    with listener() as port:
        pass
    (tmp_path / "shop.py").write_text(HOLDER.format(port=port, answer="old"))
    with run(tmp_path, "shop:app", "--port", "0", "--reload", "--reload-strategy", "recreate") as program:
        url = url_of(program)
        with Load(url, "/") as load:
            (tmp_path / "shop.py").write_text(HOLDER.format(port=port, answer="new"))
            poll_for(lambda: fetch(url).json == "new", what=program.report)
            load.more()
        assert load.failures == []
        program.interrupt()
        assert program.wait() == 0, program.report()
