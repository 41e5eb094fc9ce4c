"""The page about the REST API, made from the table of operations. Pure.

It has no scripts, and uses the style sheet of the instances' page.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from html import escape

from daskserve._version import __version__
from daskserve.cluster.scheduler.http.api.openapi import DOCUMENT_PATH, NOTE
from daskserve.cluster.scheduler.http.api.operations import OPERATIONS, Operation

_STYLE = """
main{display:block;max-width:960px;margin:auto;padding:var(--s5) var(--s4)}
main>p{margin:var(--s2) 0;color:var(--soft)}
section{background:var(--card);border:1px solid var(--line);border-radius:var(--radius);
  padding:var(--s3) var(--s4);margin:var(--s4) 0}
h2{font:600 var(--t3)/20px var(--mono)}
.op{display:grid;grid-template-columns:64px minmax(0,1fr);gap:var(--s2);padding:var(--s3) 0 0;
  margin:var(--s3) 0 0;border-top:1px solid var(--line)}
.op b{font:600 var(--t2)/20px var(--mono);color:var(--main)}
.op b.changes{color:var(--warn)}.op b.delete{color:var(--bad)}
.op li{margin:var(--s1) 0 0;font-size:var(--t2);color:var(--soft)}
.op code{color:var(--text)}
"""


def page(base: str = "") -> str:
    """Return the page; its links to other pages begin with ``base``."""
    by_path = itertools.groupby(OPERATIONS, key=lambda each: each.path)
    sections = "".join(_section(path, operations) for path, operations in by_path)
    document = f"{base}{DOCUMENT_PATH.removeprefix('/daskserve/')}"
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f"<title>REST API of daskserve {__version__}</title>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        "<meta name='color-scheme' content='light dark'>"
        f"<link rel='icon' href='{base}icon.svg' type='image/svg+xml'>"
        f"<link rel='stylesheet' href='{base}style.css'><style>{_STYLE}</style></head>"
        f"<body><main><h1>REST API of daskserve {__version__}</h1><p>{escape(NOTE)}</p>"
        f"<p><a href='{document}'>OpenAPI document</a></p>{sections}</main></body></html>"
    )


def _section(path: str, operations: Iterable[Operation]) -> str:
    rows = "".join(map(_operation, operations))
    return f"<section><h2>{escape(path)}</h2>{rows}</section>"


def _operation(each: Operation) -> str:
    kind = each.method.lower() if each.method == "DELETE" else "changes" if each.changes else "reads"
    parts = [
        f"<code>{escape(name)}</code> ({escape(type_)}): {escape(text)}"
        for name, (type_, text) in each.query.items()
    ]
    if each.body:
        parts.insert(0, f"Body: {escape(each.body)}")
    if each.is_conditional and each.changes:
        parts.append("<code>If-Match</code> (header): the ETag of what was read")
    items = "".join(f"<li>{part}</li>" for part in parts)
    more = f"<ul>{items}</ul>" if items else ""
    text = f"<p>{escape(each.summary)}</p>{more}"
    return f"<div class='op'><b class='{kind}'>{each.method}</b><div>{text}</div></div>"
