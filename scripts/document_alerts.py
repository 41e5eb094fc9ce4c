"""Write the table of alerts in docs/grafana.md from the rules' only definition.

Run without arguments it rewrites the file; with ``--check`` it exits with 1 if the file is not up to date.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from daskserve.dashboards.alerts import Alert, alerts

DOCUMENT = Path(__file__).parent.parent / "docs/grafana.md"
BLOCK = re.compile(r"(<!-- alerts -->\n).*?(<!-- end -->)", re.DOTALL)


def row(alert: Alert) -> str:
    """Return the table row of one rule."""
    meaning = re.sub(r"\{\{ \$labels\.(\w+) \}\}", r"*\1*", alert.summary)
    # Without what every expression has, or the table is too wide to be read.
    limit = re.sub(r"(sum|max) by \([\w, ]*\) |daskserve_", "", alert.expression)
    return f"| `{alert.name}` | {alert.severity.value} | {alert.lasts} | {meaning} | `{limit}` |"


def table() -> str:
    """Return all rules as Markdown."""
    head = "| alert | severity | after | meaning | while |\n| --- | --- | --- | --- | --- |\n"
    return "\n" + head + "\n".join(map(row, alerts())) + "\n\n"


def rendered(text: str) -> str:
    """Return the text with the table made anew."""
    return BLOCK.sub(lambda match: match[1] + table() + match[2], text)


def main() -> int:
    text = DOCUMENT.read_text()
    new = rendered(text)
    if "--check" in sys.argv:
        return int(new != text)
    DOCUMENT.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
