"""Which versions of daskserve work together on one cluster."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from daskserve._version import PROTOCOL, __version__
from daskserve.cluster.probe import can_mix, check_caller, mismatch, silence_probe, version_probe
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


def test_a_place_without_the_package_or_with_another_python_says_so() -> None:
    found = version_probe()()
    assert mismatch("Worker w", {**found, "version": None, "detail": "ImportError: no"}) == (
        f"Worker w cannot import daskserve (ImportError: no); install daskserve {__version__} there "
        f"(pip install daskserve=={__version__}) and restart it."
    )
    problem = mismatch("Worker w", {**found, "python": "2.7"})
    assert problem is not None
    assert problem.startswith(f"Worker w runs Python 2.7 but this program runs {found['python']};")
    scheduler = SimpleNamespace(handlers={"daskserve": None})
    assert version_probe()(scheduler)["is_supervised"]
    assert not version_probe()(SimpleNamespace(handlers={}))["is_supervised"]


def test_the_silence_of_workers_is_measured() -> None:
    workers = {n: SimpleNamespace(address=f"w{n}", last_seen=time.time() - n) for n in (5, 60)}
    found = silence_probe()(SimpleNamespace(workers=workers))
    assert {name: round(seconds) for name, seconds in found.items()} == {"w5": 5, "w60": 60}


def test_the_probe_of_this_process_matches() -> None:
    assert mismatch("Here", version_probe()()) is None
