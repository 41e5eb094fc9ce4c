"""Draw docs/architecture.svg, the rooms of the code and their imports, from the code.

Without arguments, rewrite the file. With ``--check``, exit with 1 if the file is out of date.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from rooms import ROOT, Plan, read_plan

PICTURE = ROOT / "docs/architecture.svg"
WIDTH, ROW, BOX_HEIGHT, MARGIN = 1180, 96, 46, 28
BLUE, GREEN, YELLOW, GRAY = "#dbeafe", "#dcfce7", "#fef3c7", "#f1f5f9"
#: The purpose of each room in a few words, and its color: blue for what users call, green for decisions,
#: yellow for the request path, gray for values.
CAPTIONS: Mapping[str, tuple[str, str]] = {
    "__init__": ("public names", BLUE),
    "__main__": ("python -m daskserve", BLUE),
    "testing": ("a cluster for your tests", BLUE),
    "client": ("start, deploy, inspect", BLUE),
    "openai": ("models as OpenAI serves them", BLUE),
    "cli": ("command line", BLUE),
    "handle": ("and others: public names", BLUE),
    "stores": ("back up, restore, check", BLUE),
    "metrics": ("metrics of user code", BLUE),
    "actors": ("wires the actors together", BLUE),
    "control": ("decides what runs", GREEN),
    "autoscaling": ("policies, pure", GREEN),
    "simulation": ("policies on recorded loads", GREEN),
    "dashboards": ("Grafana, alert rules", GREEN),
    "data": ("handles, routers, replicas", YELLOW),
    "proxies": ("HTTP in, requests out", YELLOW),
    "cluster": ("everything Dask", YELLOW),
    "context": ("the current request", GRAY),
    "config_file": ("the file of applications", GRAY),
    "options": ("what users may ask for", GRAY),
    "telemetry": ("what is measured", GRAY),
    "loops": ("event loops and threads", GRAY),
    "internals": ("private parts of libraries", GRAY),
    "payload": ("pickles", GRAY),
    "common": ("types, clock, settings", GRAY),
    "errors": ("what can go wrong", GRAY),
    "_version": ("the version", GRAY),
}


def text_of(room: str) -> tuple[str, str]:
    """Return the two lines in a room's box."""
    is_folder = (ROOT / "daskserve" / room).is_dir() or room == "proxies"
    name = "import daskserve" if room == "__init__" else room + ("/" if is_folder else ".py")
    return name, CAPTIONS[room][0]


#: A room on its floor, or the place where an arrow passes a floor: ``(room, other, floor)``.
Node = str | tuple[str, str, int]


@dataclass(frozen=True)
class Place:
    """Where a node is drawn."""

    center: float
    top: float
    width: float


def placed(plan: Plan) -> dict[Node, Place]:
    """Return the places of all nodes: floors from the bottom up, each node above its imports."""
    floors = plan.floors()
    top_floor = max(floors.values())
    places: dict[Node, Place] = {}
    for floor in range(top_floor + 1):
        below: dict[Node, list[Node]] = {
            room: list(plan.imports[room]) for room in floors if floors[room] == floor
        }
        for room, other in plan.direct():
            if floors[other] < floor < floors[room]:
                below[(room, other, floor)] = [_next(room, other, floor, floors)]
        nodes = sorted(below, key=lambda node: (_middle([places[each] for each in below[node]]), str(node)))
        widths = [_width(node) for node in nodes]
        gap = (WIDTH - 2 * MARGIN - sum(widths)) / (len(nodes) + 1)
        left = MARGIN + gap
        for node, width in zip(nodes, widths, strict=True):
            places[node] = Place(left + width / 2, MARGIN + (top_floor - floor) * ROW, width)
            left += width + gap
    return places


def _next(room: str, other: str, floor: int, floors: Mapping[str, int]) -> Node:
    """Return the next node of the arrow from ``room`` to ``other``, seen from a floor."""
    return other if floor - 1 == floors[other] else (room, other, floor - 1)


def _middle(places: Sequence[Place]) -> float:
    return sum(place.center for place in places) / len(places) if places else 0.0


def _width(node: Node) -> float:
    if isinstance(node, tuple):
        return 4.0
    name, caption = text_of(node)
    return max(9.0 * len(name), 7.2 * len(caption)) + 16


def arrow(plan: Plan, places: Mapping[Node, Place], room: str, other: str) -> str:
    """Return one import as a curve, which passes beside the rooms of the floors in between."""
    floors = plan.floors()
    node: Node = room
    x, y = places[room].center, places[room].top + BOX_HEIGHT
    path = f"M{x:.0f} {y:.0f}"
    for floor in range(floors[room], floors[other], -1):
        node = _next(room, other, floor, floors)
        to_x, to_y = places[node].center, places[node].top
        bend = (to_y - y) / 2
        path += f"C{x:.0f} {y + bend:.0f} {to_x:.0f} {to_y - bend:.0f} {to_x:.0f} {to_y:.0f}"
        x, y = to_x, to_y
        if isinstance(node, tuple):
            y += BOX_HEIGHT
            path += f"V{y:.0f}"
    return f'<path d="{path}" fill="none" stroke="#94a3b8" marker-end="url(#tip)"/>'


def box(place: Place, room: str) -> str:
    """Return one room."""
    name, caption = text_of(room)
    x = place.center - place.width / 2
    text = f'x="{place.center:.0f}" text-anchor="middle"'
    return "\n".join(
        [
            f'<rect x="{x:.0f}" y="{place.top:.0f}" width="{place.width:.0f}" height="{BOX_HEIGHT}" rx="6" '
            f'fill="{CAPTIONS[room][1]}" stroke="#475569"/>',
            f'<text {text} y="{place.top + 19:.0f}" fill="#0f172a">{escape(name)}</text>',
            f'<text {text} y="{place.top + 37:.0f}" fill="#64748b" font-size="12">{escape(caption)}</text>',
        ]
    )


def svg(plan: Plan) -> str:
    """Return the picture."""
    places = placed(plan)
    height = max(place.top for place in places.values()) + BOX_HEIGHT + MARGIN
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="14">',
        "<title>The rooms of daskserve. An arrow is an import; imports point down only.</title>",
        '<rect width="100%" height="100%" fill="white"/>',
        '<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#94a3b8"/></marker>',
    ]
    arrows = [arrow(plan, places, room, other) for room, other in plan.direct()]
    boxes = [box(place, node) for node, place in places.items() if isinstance(node, str)]
    return "\n".join([*head, *arrows, *boxes, "</svg>", ""])


def main() -> int:
    """Rewrite the picture, or with ``--check`` return 1 if it is not up to date."""
    picture = svg(read_plan())
    if "--check" in sys.argv:
        return int(not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != picture)
    PICTURE.write_text(picture, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
