"""Generate the table of alerts in docs/grafana.md from the definitions of the rules.

Without arguments, rewrite the file. With ``--check``, exit with 1 if the file is out of date.
"""

from __future__ import annotations

import re
import sys

from generated_tables import GeneratedTables

from daskserve.dashboards.alerts import Alert, alerts


def row(alert: Alert) -> str:
    """Return the table row of one rule."""
    meaning = re.sub(r"\{\{ \$labels\.(\w+) \}\}", r"*\1*", alert.summary)
    # Omit the common parts of all expressions, which would make the table too wide.
    limit = re.sub(r"(sum|max) by \([\w, ]*\) |daskserve_", "", alert.expression)
    return f"| `{alert.name}` | {alert.severity.value} | {alert.lasts} | {meaning} | `{limit}` |"


def table() -> str:
    """Return all rules as Markdown."""
    head = "| alert | severity | after | meaning | while |\n| --- | --- | --- | --- | --- |\n"
    return "\n" + head + "\n".join(map(row, alerts())) + "\n\n"


TABLES = GeneratedTables("docs/grafana.md", "alerts", table)


if __name__ == "__main__":
    sys.exit(TABLES.main())
