"""Command lines and environments of plain subprocesses that run one Dask server each.

A `distributed.LocalCluster` spawns its workers through multiprocessing, which runs the caller's main
module again and so needs an ``if __name__ == "__main__"`` guard. Plain subprocesses need no guard, so
pasted scripts, REPLs and notebooks work.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import dask.config

from daskserve.cluster.dask.idle_work import without_nanny_defaults
from daskserve.cluster.distributed_internals import config_variables
from daskserve.common.settings import process_variables
from daskserve.loops.event_loop import uses_uvloop

#: Program of each process of the cluster. It uses the caller's import path, as a multiprocessing child does.
#: A ``-c`` program has no main module that a nanny's child would run again.
_MAIN = (
    "import json, sys; options = json.loads(sys.argv.pop()); sys.path[:] = options['path']; "
    "import dask.config; dask.config.set(options['config']); "
    "from distributed.cli.dask_spec import main; main(options['arguments'])"
)


def command(
    cls: str,
    options: dict[str, Any],
    *addresses: str,
    prelude: str = "",
    config: Mapping[str, Any] | None = None,
) -> list[str]:
    """Return the command line of a process that runs one Dask server, after ``prelude``."""
    here = os.getcwd()
    message = {
        "path": [entry or here for entry in sys.path],
        "config": {"distributed.admin.event-loop": _event_loop(), **(config or {})},
        "arguments": [*addresses, "--spec", json.dumps({"cls": cls, "opts": options})],
    }
    return [sys.executable, "-c", prelude + _MAIN, json.dumps(message)]


def _event_loop() -> str:
    configured = str(dask.config.get("distributed.admin.event-loop"))
    # "tornado" is Dask's default, and an alias of "asyncio".
    return "uvloop" if configured == "tornado" and uses_uvloop() else configured


def environment(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of a process of the cluster, with the changes of `dask.config.set` in this one.

    This passes certificates and all other settings of these sections to the cluster. Other sections may hold
    objects such as thread pools, which must stay in this process.

    Variables that a nanny in this process has set are left out if ``config`` leaves them out.
    """
    sections = {name: dask.config.get(name, default={}) for name in ("distributed", "daskserve")}
    variables = without_nanny_defaults(process_variables(), config)
    return {**variables, **config_variables(sections)}
