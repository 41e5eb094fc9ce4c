"""Draw docs/architecture.svg, the components of the code and their imports, from the code.

Without arguments, rewrite the file. With ``--check``, exit with 1 if the file is out of date.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from components import ROOT, Plan, read_plan

PICTURE = ROOT / "docs/architecture.svg"
WIDTH, ROW, BOX_HEIGHT, MARGIN = 1180, 96, 46, 28
BLUE, GREEN, YELLOW, GRAY = "#dbeafe", "#dcfce7", "#fef3c7", "#f1f5f9"
#: The purpose of each component, in a few words, and its color: blue for what users call, green for
#: decisions, yellow for the request path, gray for values.
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


def text_of(component: str) -> tuple[str, str]:
    """Return the two lines in a component's box."""
    is_folder = (ROOT / "daskserve" / component).is_dir() or component == "proxies"
    name = "import daskserve" if component == "__init__" else component + ("/" if is_folder else ".py")
    return name, CAPTIONS[component][0]


#: A component on its layer, or the place where an arrow passes a layer: ``(component, other, layer)``.
Node = str | tuple[str, str, int]


@dataclass(frozen=True)
class Place:
    """Where a node is drawn."""

    center: float
    top: float
    width: float


def placed(plan: Plan) -> dict[Node, Place]:
    """Return the places of all nodes: layers from the bottom up, each node above its imports."""
    layers = plan.layers()
    top_layer = max(layers.values())
    places: dict[Node, Place] = {}
    for layer in range(top_layer + 1):
        below: dict[Node, list[Node]] = {
            component: list(plan.imports[component]) for component in layers if layers[component] == layer
        }
        for component, other in plan.direct():
            if layers[other] < layer < layers[component]:
                below[(component, other, layer)] = [_next(component, other, layer, layers)]
        nodes = sorted(below, key=lambda node: (_middle([places[each] for each in below[node]]), str(node)))
        widths = [_width(node) for node in nodes]
        gap = (WIDTH - 2 * MARGIN - sum(widths)) / (len(nodes) + 1)
        left = MARGIN + gap
        for node, width in zip(nodes, widths, strict=True):
            places[node] = Place(left + width / 2, MARGIN + (top_layer - layer) * ROW, width)
            left += width + gap
    return places


def _next(component: str, other: str, layer: int, layers: Mapping[str, int]) -> Node:
    """Return the next node of the arrow from ``component`` to ``other``, seen from a layer."""
    return other if layer - 1 == layers[other] else (component, other, layer - 1)


def _middle(places: Sequence[Place]) -> float:
    return sum(place.center for place in places) / len(places) if places else 0.0


def _width(node: Node) -> float:
    if isinstance(node, tuple):
        return 4.0
    name, caption = text_of(node)
    return max(9.0 * len(name), 7.2 * len(caption)) + 16


def arrow(plan: Plan, places: Mapping[Node, Place], component: str, other: str) -> str:
    """Return one import: a curve that passes beside the components of the layers in between."""
    layers = plan.layers()
    node: Node = component
    x, y = places[component].center, places[component].top + BOX_HEIGHT
    path = f"M{x:.0f} {y:.0f}"
    for layer in range(layers[component], layers[other], -1):
        node = _next(component, other, layer, layers)
        to_x, to_y = places[node].center, places[node].top
        bend = (to_y - y) / 2
        path += f"C{x:.0f} {y + bend:.0f} {to_x:.0f} {to_y - bend:.0f} {to_x:.0f} {to_y:.0f}"
        x, y = to_x, to_y
        if isinstance(node, tuple):
            y += BOX_HEIGHT
            path += f"V{y:.0f}"
    return f'<path d="{path}" fill="none" stroke="#94a3b8" marker-end="url(#tip)"/>'


def box(place: Place, component: str) -> str:
    """Return one component."""
    name, caption = text_of(component)
    x = place.center - place.width / 2
    text = f'x="{place.center:.0f}" text-anchor="middle"'
    return "\n".join(
        [
            f'<rect x="{x:.0f}" y="{place.top:.0f}" width="{place.width:.0f}" height="{BOX_HEIGHT}" rx="6" '
            f'fill="{CAPTIONS[component][1]}" stroke="#475569"/>',
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
        "<title>The components of daskserve. An arrow is an import; imports point down only.</title>",
        '<rect width="100%" height="100%" fill="white"/>',
        '<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#94a3b8"/></marker>',
    ]
    arrows = [arrow(plan, places, component, other) for component, other in plan.direct()]
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
