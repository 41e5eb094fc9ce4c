"""Generate the dashboards' files in daskserve/dashboards from their definitions in scripts/grafana.

Without arguments, rewrite the files. With ``--check``, exit with 1 if one is out of date.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from grafana.dashboards import DASHBOARDS, as_json

FOLDER = Path(__file__).parent.parent / "daskserve/dashboards"


def generated() -> dict[Path, str]:
    """Return the text of each file."""
    return {FOLDER / f"{each.uid}.json": json.dumps(as_json(each), indent=2) + "\n" for each in DASHBOARDS}


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(any(path.read_text() != text for path, text in generated().items()))
    for path, text in generated().items():
        path.write_text(text)
