"""A chaos run that causes no failure is not a success."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield the function of the program, which changes the environment and handles signals."""
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    previous = signal.getsignal(signal.SIGTERM)
    import chaos

    yield chaos.main
    signal.signal(signal.SIGTERM, previous)


def test_a_run_without_its_tools_is_no_success(
    main: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["--only", "cut"]) == 2
    output = capsys.readouterr().out
    assert "nothing was tried" in output
    assert "install ip and iptables (Debian's packages iproute2 and iptables)" in output


def test_a_run_of_unknown_faults_is_no_success(main: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--only", "cut,cuts"])
    assert caught.value.code == 2
    assert "no faults of these names: 'cuts'" in capsys.readouterr().err
