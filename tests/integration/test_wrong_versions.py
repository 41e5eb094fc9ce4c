"""Schedulers and workers without daskserve or with another version: the errors name them and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
from dask_processes import ExternalCluster, dask_scheduler, dask_worker, poll_for, within
from distributed import Client

import daskserve as serve
from daskserve.errors import VersionMismatchError

NO_SERVER = {"location": "NoServer"}

#: Code that runs before the Dask process starts, and the resulting message.
MISSING = "import sys; sys.modules['daskserve'] = None"
OTHER = "import daskserve._version; daskserve._version.__version__ = '0.0.9'"
PATCHED = (
    "import daskserve._version as version; "
    "version.__version__ = '.'.join(version.__version__.split('.')[:2]) + '.99'"
)
WRONG = [
    pytest.param(MISSING, r"cannot import daskserve .*pip install daskserve==", id="missing"),
    pytest.param(
        OTHER,
        r"has daskserve 0\.0\.9, this program has .*pip install daskserve==",
        id="other version",
        marks=pytest.mark.nightly,
    ),
]


@pytest.mark.parametrize(("prelude", "message"), WRONG)
def test_a_wrong_version_on_the_scheduler_fails_the_start(prelude: str, message: str, tmp_path: Path) -> None:
    """The errors of start and connect name the scheduler; nothing is left in it."""
    with dask_scheduler(tmp_path, prelude=prelude) as address:
        with Client(address, set_as_default=False) as dask_client:
            for call in (serve.start, serve.connect):
                with pytest.raises(VersionMismatchError, match=f"scheduler {address} {message}"), within(5):
                    call(dask_client=dask_client)
            found = dask_client.run_on_scheduler(
                lambda dask_scheduler: [
                    name
                    for names in (dask_scheduler.plugins, dask_scheduler.handlers, dask_scheduler.clients)
                    for name in names
                    if "daskserve" in name
                ]
            )
            assert found == []


@pytest.mark.parametrize(("prelude", "message"), WRONG)
def test_a_wrong_version_on_a_worker_fails_the_start(
    prelude: str, message: str, external: ExternalCluster, tmp_path: Path
) -> None:
    """The start fails and names the worker, although others match; without it the same start works."""
    with dask_worker(external.address, tmp_path, prelude=prelude, name="wrong"):
        external.client.wait_for_workers(3)
        workers = external.client.scheduler_info(n_workers=-1)["workers"]
        (wrong,) = (address for address, facts in workers.items() if facts["name"] == "wrong")
        with pytest.raises(VersionMismatchError, match=f"Worker {wrong} {message}"), within(5):
            serve.start(http_options={"port": 0}, dask_client=external.client)
        external.assert_clean(topics=False)
    poll_for(lambda: len(external.client.scheduler_info(n_workers=-1)["workers"]) == 2)
    with serve.start(http_options={"port": 0}, dask_client=external.client) as client:
        assert client.status().refused_workers == {}


@pytest.mark.parametrize(("prelude", "message"), WRONG)
def test_a_worker_with_a_wrong_version_that_joins_later_is_refused(
    prelude: str, message: str, external: ExternalCluster, client: serve.Client, tmp_path: Path
) -> None:
    """It gets no actors, the status names it, and the instance keeps running on the others."""
    with dask_worker(external.address, tmp_path, prelude=prelude, name="wrong"):
        (wrong,) = poll_for(lambda: list(client.status().refused_workers))
        assert external.client.scheduler_info(n_workers=-1)["workers"][wrong]["name"] == "wrong"
        problem = client.status().refused_workers[wrong]
        assert problem.startswith(f"Worker {wrong} ")
        with pytest.raises(ValueError, match=message):
            raise ValueError(problem)
        client.create_backend("many", "served.echo", config={"num_replicas": 12})
        assert {each.worker for each in client.status().replicas("many")} == {
            address for address in external.client.scheduler_info(n_workers=-1)["workers"] if address != wrong
        }
    poll_for(lambda: not client.status().refused_workers)


def test_a_worker_of_another_patch_version_that_joins_later_takes_replicas(
    external: ExternalCluster, client: serve.Client, tmp_path: Path
) -> None:
    """It gets replicas like the earlier workers."""
    with dask_worker(external.address, tmp_path, prelude=PATCHED, name="late"):
        external.client.wait_for_workers(3)
        workers = external.client.scheduler_info(n_workers=-1)["workers"]
        (late,) = (address for address, facts in workers.items() if facts["name"] == "late")
        client.create_backend("there", "served.echo", actor_options={"workers": [late]}, timeout_s=10)
        (replica,) = client.status().replicas("there")
        assert replica.worker == late
        client.delete_backend("there", force=True)
