"""Generate the table of alerts in docs/grafana.md from the definitions of the rules.

Without arguments, rewrite the file. With ``--check``, exit with 1 if the file is out of date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

import yaml
from generated_tables import GeneratedTables

from daskserve.dashboards.files import rules


def row(rule: Mapping[str, Any]) -> str:
    """Return the table row of one rule."""
    meaning = re.sub(r"\{\{ \$labels\.(\w+) \}\}", r"*\1*", rule["annotations"]["summary"])
    # Omit the common parts of all expressions, which would make the table too wide.
    limit = re.sub(r"(sum|max) by \([\w, ]*\) |daskserve_", "", rule["expr"])
    return f"| `{rule['alert']}` | {rule['labels']['severity']} | {rule['for']} | {meaning} | `{limit}` |"


def table() -> str:
    """Return all rules as Markdown."""
    head = "| alert | severity | after | meaning | while |\n| --- | --- | --- | --- | --- |\n"
    return "\n" + head + "\n".join(map(row, yaml.safe_load(rules())["groups"][0]["rules"])) + "\n\n"


TABLES = GeneratedTables("docs/grafana.md", "alerts", table)


if __name__ == "__main__":
    sys.exit(TABLES.main())
