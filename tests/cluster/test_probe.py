"""Which versions of daskserve work together on one cluster."""

from __future__ import annotations

from typing import Any

import pytest

from daskserve._version import PROTOCOL, __version__
from daskserve.cluster.probe import can_mix, check_caller, mismatch, version_probe
from daskserve.errors import VersionMismatchError

MINOR = ".".join(__version__.split(".")[:2])


def test_patch_versions_with_the_same_protocol_mix() -> None:
    for version, protocol, expected in [
        (__version__, PROTOCOL, True),
        (f"{MINOR}.99", PROTOCOL, True),
        (f"{MINOR}.99rc1", PROTOCOL, True),
        (f"{MINOR}.99", PROTOCOL + 1, False),
        (f"{MINOR}9.0", PROTOCOL, False),
        ("99.0.0", PROTOCOL, False),
        (__version__, None, False),  # it was made before there was a protocol number
    ]:
        assert can_mix(version, protocol) is expected, version
        found: dict[str, Any] = {**version_probe()(), "version": version, "protocol": protocol}
        problem = mismatch("Worker w", found)
        if expected:
            assert problem is None, version
            check_caller("tcp://s", version, protocol)
        else:
            assert problem is not None, version
            assert problem.startswith(
                f"Worker w has daskserve {version}, this program has {__version__}; install"
            )
            with pytest.raises(
                VersionMismatchError, match=r"The scheduler tcp://s has daskserve .*, this program"
            ):
                check_caller("tcp://s", version, protocol)


def test_the_probe_of_this_process_matches() -> None:
    assert mismatch("Here", version_probe()()) is None
