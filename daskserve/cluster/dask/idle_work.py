"""Dask's options for processes that serve.

Dask's profiler, its check of blocked event loops, and its monitors of memory and of the machine wake each
process about a hundred times a second. A worker that serves 500 requests per second spends a tenth of its
time on that. On the clusters that daskserve starts, they run less often, unless you have configured them.

Dask also makes the C library return memory to the system early. Then each buffer of 128 KiB or more is
mapped, filled with zeros and unmapped each time, and a request with a body of 10 MB takes twice the CPU time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dask.config

_PRE_SPAWN = "distributed.nanny.pre-spawn-environ"

#: The Dask options, and their values in a cluster that serves.
QUIET: Mapping[str, Any] = {
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "500ms",
    "distributed.worker.memory.monitor-interval": "500ms",
    "distributed.admin.system-monitor.interval": "2s",
    # Dask leaves out a variable that is None.
    f"{_PRE_SPAWN}.MALLOC_TRIM_THRESHOLD_": None,
}


def quiet_config() -> dict[str, Any]:
    """Return the values for the options that still have Dask's defaults."""
    defaults = dask.config.merge(*dask.config.defaults)
    return {
        path: value
        for path, value in QUIET.items()
        if dask.config.get(path, None) == dask.config.get(path, None, config=defaults)
    }


def without_nanny_defaults(variables: Mapping[str, str], config: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables without Dask's defaults that ``config`` leaves out.

    Dask's nannies set their default variables in the program that starts them, and its later child processes
    would inherit them. If the variable has another value, the user has set it, and it is kept.
    """
    defaults = dask.config.get(_PRE_SPAWN, config=dask.config.merge(*dask.config.defaults))
    left_out = {
        name: str(value)
        for name, value in defaults.items()
        if config.get(f"{_PRE_SPAWN}.{name}", ...) is None
    }
    return {name: value for name, value in variables.items() if left_out.get(name) != value}
