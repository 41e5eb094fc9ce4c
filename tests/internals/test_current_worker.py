"""Dask's current worker and client in processes that are not workers."""

from __future__ import annotations

import contextvars
import sys
import threading
from pathlib import Path

import distributed.client
import distributed.worker
import pytest
from distributed import default_client, get_worker

from daskserve.internals import current_worker
from daskserve.internals.current_worker import answer_get_worker


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo the change of the process."""
    monkeypatch.setattr(distributed.worker, "_worker_cvar", distributed.worker._worker_cvar)
    monkeypatch.setattr(distributed.client, "_current_client", distributed.client._current_client)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))


def test_get_worker_returns_the_stand_in_in_every_context_and_thread() -> None:
    stand_in, client = object(), object()
    answer_get_worker(stand_in, client)

    def find() -> tuple[object, object]:
        return get_worker(), default_client()

    found = [find(), contextvars.Context().run(find)]
    thread = threading.Thread(target=lambda: found.append(find()))
    thread.start()
    thread.join()
    assert found == [(stand_in, client)] * 3


def test_a_worker_of_this_process_is_the_current_one_in_its_own_tasks() -> None:
    answer_get_worker(object(), object())
    worker = object()
    context = contextvars.copy_context()
    context.run(distributed.worker._worker_cvar.set, worker)  # type: ignore[arg-type]
    assert context.run(get_worker) is worker


def test_a_package_that_is_imported_later_gets_the_stand_in_at_its_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "late_distributed"
    package.mkdir()
    package.joinpath("__init__.py").write_text("from late_distributed.worker import get_worker\n")
    package.joinpath("client.py").write_text("_current_client = None\n")
    package.joinpath("worker.py").write_text(
        "from late_distributed import client\n"
        "import contextvars\n"
        "_worker_cvar = contextvars.ContextVar('_worker_cvar')\n"
        "def get_worker(): return _worker_cvar.get()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(current_worker, "_PACKAGE", "late_distributed")
    variables = {"late_distributed.worker": "_worker_cvar", "late_distributed.client": "_current_client"}
    monkeypatch.setattr(current_worker, "_VARIABLES", variables)
    stand_in, finders = object(), list(sys.meta_path)
    answer_get_worker(stand_in, object())
    assert "late_distributed" not in sys.modules
    try:
        from late_distributed.worker import get_worker as get_late_worker

        assert get_late_worker() is stand_in
        assert sys.meta_path == finders
    finally:
        for name in ("late_distributed", *variables):
            sys.modules.pop(name, None)
