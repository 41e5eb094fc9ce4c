"""Fill a store with the code of an earlier commit, for ``tests/control/test_old_stores.py``.

Run as ``.venv/bin/python scripts/make_old_store.py COMMIT``. It unpacks the commit, starts that version on a
local Dask cluster with an SQLite store, and creates every kind of record that the version has. It copies the
file while everything runs and one change is under way, as after a crash. It writes
``tests/control/old_stores/DATE-COMMIT.db.gz``. Make such a file whenever the format of a record changes.
"""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
OLD_STORES = HERE / "tests" / "control" / "old_stores"

#: Runs with the earlier code on the import path; the argument is the file to write.
PROGRAM = """
import contextlib, sqlite3, sys, tempfile
from distributed import Client, LocalCluster
import daskserve as serve

def fill(client):
    client.create_backend("text", "builtins.repr", config={"num_replicas": 2})
    client.create_endpoint("text", backend="text", route="/text", methods=["GET"])
    client.create_backend("placed", "builtins.repr", actor_options={"num_cpus": 0.5, "resources": {"R": 1}})
    client.create_endpoint("split", backend="placed", route="/split")
    client.set_traffic("split", {"placed": 0.5, "text": 0.5})
    client.shadow_traffic("text", "placed", 0.1)
    client.update_backend_config("placed", {"max_concurrent_queries": 3, "user_config": None})
    own = {"isolation": "process"}
    client.create_backend("isolated", "builtins.repr", config=own, actor_options={"resources": {"I": 1}})
    client.deploy("named", "builtins.repr", version="1")
    client.deploy("named", "builtins.repr", version="2")
    scaling = {"min_replicas": 1, "max_replicas": 3}
    if "autoscaling_config" in serve.config.BackendConfig.model_fields:
        client.create_backend("scaled", "builtins.repr", config={"autoscaling_config": scaling})
    if hasattr(client, "set_target_capacity"):
        client.set_target_capacity(100.0)
    if hasattr(client, "run_many"):
        front = serve.deployment(name="front")("builtins.repr")
        client.run(front.bind(), name="shop", route_prefix="/shop")
    client.create_backend("waiting", "builtins.repr", actor_options={"num_gpus": 8}, blocking=False)

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        live = f"{folder}/live.db"
        options = {"threads_per_worker": 4, "dashboard_address": None, "resources": {"R": 4, "I": 1}}
        with LocalCluster(n_workers=1, **options) as cluster, Client(cluster, set_as_default=False) as dask:
            client = serve.start(
                dask_client=dask, store=f"sqlite:///{live}", name="old", http_options={"location": "NoServer"}
            )
            fill(client)
            with contextlib.closing(sqlite3.connect(live)) as db:
                with contextlib.closing(sqlite3.connect(sys.argv[1])) as copy:
                    db.backup(copy)
                    copy.execute("PRAGMA journal_mode = DELETE")
                    copy.execute("VACUUM")
            client.shutdown()
"""


def main(commit: str) -> None:
    """Write the store of one commit."""
    show = ["git", "-C", str(HERE), "show", "-s", "--format=%cs-%h", commit]
    name = subprocess.check_output(show, text=True).strip()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        tree.mkdir()
        archive = subprocess.check_output(["git", "-C", str(HERE), "archive", commit])
        subprocess.run(["tar", "-x", "-C", str(tree)], input=archive, check=True)
        (tree / "daskserve" / "proxies").symlink_to("../proxies")
        program, copy = Path(folder) / "program.py", Path(folder) / "copy.db"
        program.write_text(PROGRAM)
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        subprocess.run([sys.executable, str(program), str(copy)], env=environment, cwd=folder, check=True)
        OLD_STORES.mkdir(exist_ok=True)
        (OLD_STORES / f"{name}.db.gz").write_bytes(gzip.compress(copy.read_bytes(), mtime=0))


if __name__ == "__main__":
    main(sys.argv[1])
