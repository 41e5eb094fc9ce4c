"""``daskserve run`` serves from a shell, and leaves nothing behind."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dask_processes import ExternalCluster, Program, fetch, poll_for, wait_until_gone

#: The installed command, whose own folder is not that of the project.
COMMAND = str(Path(sys.executable).with_name("daskserve"))
#: The folder of Dask's workers.
SCRATCH = "dask-scratch-space"

SHOP = """
import os
import daskserve as serve
from fastapi import FastAPI
from prices import PRICE

app = FastAPI()

@serve.deployment(isolation="process")
@serve.ingress(app)
class Shop:
    def __init__(self, factor):
        self.factor = factor

    @app.get("/price")
    def price(self):
        return [PRICE * self.factor, os.getpid()]

def build(args):
    return Shop.bind(int(args["factor"]))
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
    with run(tmp_path, "shop:build", "factor=3", "--port", "0", "--route-prefix", "/api") as program:
        price, pid = fetch(f"{url_of(program)}/api/price").json
        processes = program.descendants()
        assert price == 21
        assert pid in [each.pid for each in processes]
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
