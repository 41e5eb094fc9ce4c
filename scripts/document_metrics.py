"""Generate the tables of docs/metrics.md from the definitions of the metrics.

Without arguments, rewrite the file. With ``--check``, exit with 1 if the file is out of date.
"""

from __future__ import annotations

import sys

from generated_tables import GeneratedTables

from daskserve.telemetry.table import SECTIONS, MetricSpec


def row(spec: MetricSpec) -> str:
    """Return the table row of one metric."""
    labels = ", ".join(f"`{label}`" for label in spec.exported_labels if label != "serve_instance")
    return f"| `{spec.exported_name}` | {spec.kind.value} | {labels} | {spec.meaning} |"


def tables() -> str:
    """Return all metrics as Markdown, section by section."""
    parts = []
    for title, specs in SECTIONS.items():
        head = f"### {title}\n\n| metric | kind | labels | meaning |\n| --- | --- | --- | --- |\n"
        parts.append(head + "\n".join(map(row, specs)) + "\n")
    return "\n" + "\n".join(parts) + "\n"


TABLES = GeneratedTables("docs/metrics.md", "metrics", tables)


if __name__ == "__main__":
    sys.exit(TABLES.main())
