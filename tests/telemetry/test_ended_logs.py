"""The logs of child processes that have ended."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from daskserve.telemetry.logs.ended import FILE_BYTES, MAX_FILES, EndedFiles, ProcessFile


@pytest.fixture
def add(tmp_path: Path) -> Callable[[EndedFiles, str, bytes], None]:
    """Return a function that adds a file with some content."""

    def add(files: EndedFiles, name: str, content: bytes) -> None:
        with (tmp_path / name).open("w+b") as file:
            file.write(content)
            file.flush()
            files.add(ProcessFile(name, "i", file.fileno()))

    return add


def contents(files: EndedFiles) -> list[tuple[str, bytes]]:
    return [(each.name, os.pread(each.descriptor, 2 * FILE_BYTES, 0)) for each in files]


def test_the_last_part_of_a_large_file_is_kept(add: Callable[[EndedFiles, str, bytes], None]) -> None:
    files = EndedFiles()
    whole = b"b" * FILE_BYTES
    add(files, "whole", whole)
    add(files, "large", b"first" + whole[4:] + b"last")
    assert contents(files) == [("whole", whole), ("large", whole[4:] + b"last")]
    files.close()
    assert contents(files) == []


def test_the_files_of_the_last_processes_are_kept(add: Callable[[EndedFiles, str, bytes], None]) -> None:
    files = EndedFiles()
    for number in range(MAX_FILES + 2):
        add(files, str(number), b"x")
    assert [each.name for each in files] == [str(number) for number in range(2, MAX_FILES + 2)]
    files.close()
