"""Dask's periodic work in the clusters that daskserve starts."""

from __future__ import annotations

import dask.config
import dask.utils
import distributed  # noqa: F401 - its defaults

from daskserve.cluster.dask.idle_work import QUIET, quiet_config, without_nanny_defaults


def test_every_option_is_one_of_dasks_and_slower_than_its_default() -> None:
    defaults = dask.config.merge(*dask.config.defaults)
    for path, value in QUIET.items():
        default = dask.config.get(path, config=defaults)  # raises if there is none
        if value is False:
            assert default is True
        elif value is None:
            assert path.startswith("distributed.nanny.pre-spawn-environ.")
        else:
            assert dask.utils.parse_timedelta(value) > dask.utils.parse_timedelta(default)


def test_an_option_that_was_changed_stays() -> None:
    assert quiet_config() == QUIET
    with dask.config.set({"distributed.admin.tick.interval": "30ms"}):
        assert quiet_config() == {
            path: value for path, value in QUIET.items() if path != "distributed.admin.tick.interval"
        }


def test_a_variable_that_a_nanny_of_this_process_has_set_is_left_out() -> None:
    """Dask's nannies also set such variables in the process that starts them."""
    given = {"MALLOC_TRIM_THRESHOLD_": "65536", "PATH": "/bin", "OMP_NUM_THREADS": "1"}
    assert without_nanny_defaults(given, QUIET) == {"PATH": "/bin", "OMP_NUM_THREADS": "1"}
    assert without_nanny_defaults(given, {}) == given
    by_user = {"MALLOC_TRIM_THRESHOLD_": "131072"}
    assert without_nanny_defaults(by_user, QUIET) == by_user
