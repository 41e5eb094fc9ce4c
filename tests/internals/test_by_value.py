"""Objects that a program defines work in a process without the program's module."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.smoke

PROGRAM = Path(__file__).parent.parent / "support" / "program_by_value.py"
#: Calls the pickled functions; prints the functions whose results differ from the program's, and their
#: number.
RECEIVER = """
import pickle, sys, traceback

with open(sys.argv[1], "rb") as file:
    cases = pickle.load(file)
for name, data, expected in cases:
    try:
        found = repr(pickle.loads(data)())
    except Exception:
        found = traceback.format_exc()
    if found != expected:
        print(name, found, "instead of", expected, sep="\\n")
print(len(cases))
"""


def test_code_of_a_program_works_without_the_program(tmp_path: Path) -> None:
    file = str(tmp_path / "pickled")
    subprocess.run([sys.executable, str(PROGRAM), file], check=True, cwd=tmp_path)
    receiver = [sys.executable, "-c", RECEIVER, file]
    found = subprocess.run(receiver, check=True, cwd=tmp_path, capture_output=True, text=True).stdout
    assert found == "11\n"
