"""Flame graphs of profiles as SVG and as an HTML page, without external resources. Pure.

The page contains one script, which its Content-Security-Policy allows by digest. Names from user code are
escaped everywhere.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

from daskserve.telemetry.profiling.report import percent, place, summary, tables

#: Width of a graph, height of a frame, and the space above and below, in pixels.
WIDTH, ROW, TOP, EDGE = 1200, 17, 44, 10
#: Width of a letter, and of the narrowest frame that is drawn.
LETTER, NARROWEST = 6.6, 0.4
#: Maximum number of frames that are drawn; the widest are chosen.
MAX_FRAMES = 5000
_SCRIPT = """\
"use strict";
const svg = document.querySelector("svg"), all = [...svg.querySelectorAll("g.f")];
const of = (g) => ({x: +g.dataset.x, w: +g.dataset.w, d: +g.dataset.d});
let shown = null;
function show(root) {
  shown = root;
  const r = root ? of(root) : {x: 0, w: 1200, d: 0};
  for (const g of all) {
    const {x, w, d} = of(g), inside = x >= r.x - 0.01 && x + w <= r.x + r.w + 0.01;
    const above = d < r.d && x <= r.x + 0.01 && x + w >= r.x + r.w - 0.01;
    g.style.display = inside && d >= r.d || above ? "" : "none";
    const left = above ? 0 : (x - r.x) * 1200 / r.w, width = above ? 1200 : w * 1200 / r.w;
    const box = g.querySelector("rect"), text = g.querySelector("text"), name = g.dataset.n;
    box.setAttribute("x", left); box.setAttribute("width", Math.max(0.3, width - 0.5));
    if (text) {
      const room = Math.floor((width - 6) / 6.6);
      text.setAttribute("x", left + 3);
      text.textContent = room < 3 ? "" : name.length > room ? name.slice(0, room - 1) + "\\u2026" : name;
    }
  }
}
for (const g of all) {
  g.addEventListener("click", () => show(shown === g ? null : g));
  g.addEventListener("keydown", (e) => { if (e.key === "Enter") show(shown === g ? null : g); });
}
document.addEventListener("keydown", (e) => { if (e.key === "Escape") show(null); });
document.querySelector("#find").addEventListener("input", (e) => {
  const part = e.target.value.toLowerCase();
  for (const g of all)
    g.classList.toggle("found", part !== "" && g.dataset.n.toLowerCase().includes(part));
});
"""
_STYLE = """\
:root{color-scheme:light dark}
body{font:15px/1.45 system-ui,sans-serif;margin:1.5rem auto;max-width:1240px;padding:0 1rem}
h1{font-size:1.3rem;margin:0 0 .3rem}h2{font-size:1.05rem;margin:1.6rem 0 .4rem}p{margin:.3rem 0}
table{border-collapse:collapse;font-size:.9rem}td,th{padding:.15rem 1rem .15rem 0;text-align:left}
td:first-child,th:first-child{text-align:right}code,td{font-family:ui-monospace,monospace}
input{font:inherit;padding:.2rem .4rem;margin:.4rem 0}
div.graph{overflow-x:auto}svg{max-width:100%;height:auto}
g.f{cursor:pointer}g.f:focus rect,g.found rect{stroke:#06c;stroke-width:2}
"""


@dataclass(slots=True)
class Frame:
    """One box of a flame graph: a function, and the functions that it calls."""

    name: str
    file: str = ""
    line: int = 0
    count: int = 0
    running: int = 0
    calls: dict[int, Frame] = field(default_factory=dict)


def tree_of(profile: Mapping[str, Any]) -> Frame:
    """Return the stacks of a profile as one tree, whose root counts all samples with user code."""
    root = Frame("all user code")
    for numbers, count, running in profile.get("stacks", ()):
        frame = root
        frame.count += count
        frame.running += running
        for number in numbers:
            known = frame.calls.get(number)
            if known is None:
                known = frame.calls[number] = Frame(*profile["functions"][number])
            frame = known
            frame.count += count
            frame.running += running
    return root


def _boxes(root: Frame) -> list[tuple[Frame, int, float, float]]:
    """Return the frames to draw with depth, place and width, outer ones first."""

    def below(frame: Frame, depth: int, x: float, width: float) -> Iterator[tuple[Frame, int, float, float]]:
        waiting = [(frame, depth, x, width)]
        while waiting:
            frame, depth, x, width = waiting.pop()
            yield frame, depth, x, width
            for call in sorted(frame.calls.values(), key=lambda each: (each.name, each.file, each.line)):
                part = width * call.count / frame.count
                if part >= NARROWEST:
                    waiting.append((call, depth + 1, x, part))
                x += part

    found = list(below(root, 0, 0.0, float(WIDTH))) if root.count else []
    widest = sorted(found, key=lambda each: -each[3])[:MAX_FRAMES]
    return sorted(widest, key=lambda each: each[1])


def flame_svg(profile: Mapping[str, Any], *, is_alone: bool = True) -> str:
    """Return the flame graph of a profile: outer functions below, each frame as wide as its share of samples.

    Parameters
    ----------
    is_alone : bool
        Whether it is a separate file; otherwise it has the attributes that the script of the page needs.
    """
    root = tree_of(profile)
    boxes = _boxes(root)
    rows = max((depth for _, depth, _, _ in boxes), default=0) + 1
    height = TOP + rows * ROW + EDGE
    title = f"{profile.get('replica', '')}: {summary(profile)}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="ui-monospace,monospace" font-size="11" role="img" '
        f'aria-label="Flame graph of {_safe(str(profile.get("replica", "")))}">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="6" y="17" font-size="13" fill="#222">{_safe(title) if is_alone else ""}</text>',
        '<text x="6" y="34" fill="#555">Warm: on a processor. Cool: waits. As wide as its share of the '
        "samples.</text>",
    ]
    for frame, depth, x, width in boxes:
        parts.append(_box(frame, root.count, x, height - EDGE - (depth + 1) * ROW, width, depth, is_alone))
    if not boxes:
        parts.append(f'<text x="6" y="{height - EDGE}" fill="#222">No user code ran.</text>')
    return "\n".join([*parts, "</svg>", ""])


def _box(frame: Frame, total: int, x: float, y: float, width: float, depth: int, is_alone: bool) -> str:
    name, where = _safe(frame.name), _safe(place(frame.file, frame.line))
    title = f"{name}{f' ({where})' if where else ''}: {percent(frame.count, total)}"
    if frame.count:
        title += f", {percent(frame.running, frame.count)} of it on a processor"
    room = int((width - 6) / LETTER)
    shown = "" if room < 3 else frame.name if len(frame.name) <= room else f"{frame.name[: room - 1]}…"
    data = "" if is_alone else f' data-x="{x:.2f}" data-w="{width:.2f}" data-d="{depth}" data-n="{name}"'
    focus = "" if is_alone else ' tabindex="0"'
    text = f'<text x="{x + 3:.2f}" y="{y + 12:.0f}" fill="#111">{_safe(shown)}</text>'
    return (
        f'<g class="f"{data}{focus}><title>{title}</title><rect x="{x:.2f}" y="{y:.0f}" '
        f'width="{max(0.3, width - 0.5):.2f}" height="{ROW - 1}" rx="1.5" fill="{_colour(frame)}"/>'
        f"{text if shown or not is_alone else ''}</g>"
    )


def _colour(frame: Frame) -> str:
    """Return a colour between cool and warm, slightly different for each function."""
    share = frame.running / max(1, frame.count)
    shade = (
        int(hashlib.blake2b(f"{frame.name}{frame.file}".encode(errors="replace")).hexdigest()[:2], 16) / 255
    )
    warm, cool = (250, 150 + 50 * shade, 80), (130, 175 + 40 * shade, 235)
    mixed = (round(a * share + b * (1 - share)) for a, b in zip(warm, cool, strict=True))
    return "#" + "".join(f"{each:02x}" for each in mixed)


def page_policy() -> str:
    """Return the Content-Security-Policy of the page: its own script and style, and nothing else."""
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"


def flame_page(profile: Mapping[str, Any]) -> str:
    """Return a page with the flame graph, which can be enlarged and searched, and the hottest lines."""
    name = _safe(str(profile.get("replica", "")))
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(page_policy())}">'
        f'<meta name="viewport" content="width=device-width"><title>Profile of {name}</title>'
        f"<style>{_STYLE}</style></head><body><main><h1>Profile of {name}</h1>"
        f"<p>{_safe(summary(profile))}</p>"
    ]
    if "stacks" in profile:
        parts.append(
            "<p>Click a frame to enlarge it, again to go back.</p>"
            '<label>Find a function: <input id="find" type="search"></label>'
            f'<div class="graph">{flame_svg(profile, is_alone=False)}</div>'
        )
    for title, heads, rows in tables(profile):
        cells = "".join(f"<th>{_safe(each)}</th>" for each in heads)
        lines = "".join(f"<tr>{''.join(f'<td>{_safe(str(each))}</td>' for each in row)}</tr>" for row in rows)
        parts.append(f"<h2>{_safe(title)}</h2><table><tr>{cells}</tr>{lines}</table>")
    script = f"<script>{_SCRIPT}</script>" if "stacks" in profile else ""
    return "".join([*parts, f"</main>{script}</body></html>\n"])


def _safe(text: str) -> str:
    """Return a string for markup, without characters that XML does not have."""
    return escape("".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text))
