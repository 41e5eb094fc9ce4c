"""The data of the panels: the live metrics of the last minutes, as columns. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from daskserve.common.formatting import shown

#: The path of the page with all panels.
PATH = "/daskserve-panels"
#: Length of the time axis in seconds, and maximum number of lines in a panel. The busiest deployments have
#: lines; the others are summed up.
SHOWN_S, MAX_LINES = 300, 9
#: Maximum number of workers in a panel.
MAX_WORKERS = 60
#: Maximum number of characters of a name in a legend.
MAX_LABEL = 28
#: A longer pause between two values is a gap in a line.
GAP_S = 5.0
OTHERS = "others"
#: Columns by name, for a bokeh data source.
Columns: TypeAlias = dict[str, list[Any]]


class Series:
    """The answers of the last minutes, each with its time."""

    def __init__(self) -> None:
        self._answers: deque[Mapping[str, Any]] = deque(maxlen=SHOWN_S)

    def add(self, time: float, answers: Mapping[str, Mapping[str, Any] | None]) -> None:
        """Add the live metrics of the instances, by name; None for an instance that has not answered."""
        is_one = len(answers) <= 1
        deployments: dict[str, Mapping[str, Any]] = {}
        replicas: list[tuple[str, str]] = []
        for instance, live in answers.items():
            if live is None:
                continue
            label = "" if is_one else f"{instance}: "
            deployments |= {f"{label}{tag}": each for tag, each in live.get("deployments", {}).items()}
            replicas += [
                (str(each.get("worker") or "?"), f"{label}{each.get('deployment')}")
                for each in live.get("replicas", {}).values()
            ]
        self._answers.append({"time": time, "deployments": deployments, "replicas": replicas})

    def busiest(self) -> list[str]:
        """Return the names of the deployments with the most recent requests, sorted."""
        total: Counter[str] = Counter()
        for each in self._answers:
            for name, values in each["deployments"].items():
                total[name] += (values.get("requests_per_s") or 0) + (values.get("ongoing") or 0)
        first = sorted(total, key=lambda name: (-total[name], name))[:MAX_LINES]
        return sorted(first)

    def lines(self, metric: str, *, adds_up: bool) -> dict[str, tuple[list[float], list[float]]]:
        """Return times in milliseconds and values of a metric, by deployment.

        Parameters
        ----------
        adds_up : bool
            Whether deployments without a line are summed up in one line.
        """
        shown = self.busiest()
        found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in shown}
        for each in self._answers:
            rest = 0.0
            has_rest = False
            for name, values in each["deployments"].items():
                value = values.get(metric)
                if name in found and name != OTHERS:
                    _append(found[name], each["time"], value)
                elif adds_up and value is not None:
                    rest, has_rest = rest + value, True
            if has_rest:
                _append(found.setdefault(OTHERS, ([], [])), each["time"], rest)
        return found

    def columns(
        self, metrics: Sequence[tuple[str, str]], colours: Sequence[str], *, adds_up: bool
    ) -> Columns:
        """Return the lines of some metrics as columns. Each metric comes with its line style."""
        data: Columns = {name: [] for name in ("xs", "ys", "name", "label", "what", "colour", "dash", "last")}
        for metric, dash in metrics:
            for number, (name, (xs, ys)) in enumerate(self.lines(metric, adds_up=adds_up).items()):
                data["xs"].append(xs)
                data["ys"].append(ys)
                data["name"].append(name)
                data["label"].append(label(name))
                data["what"].append(metric)
                data["colour"].append(colours[number % len(colours)])
                data["dash"].append(dash)
                data["last"].append(shown(ys[-1]) if ys and ys[-1] == ys[-1] else "")
        return data

    def replicas(self, colours: Sequence[str]) -> Columns:
        """Return the current replicas as bars: one row for each worker, one part for each deployment."""
        columns = ("worker", "left", "right", "deployment", "label", "count", "colour")
        data: Columns = {name: [] for name in columns}
        shown = self.busiest()
        pairs: Iterable[tuple[str, str]] = self._answers[-1]["replicas"] if self._answers else ()
        counts = Counter((worker, name if name in shown else OTHERS) for worker, name in pairs)
        names = [*shown, OTHERS]
        workers = sorted({worker for worker, _ in counts})
        for worker in workers[:MAX_WORKERS]:
            left = 0
            for number, name in enumerate(names):
                count = counts.get((worker, name), 0)
                if count:
                    data["worker"].append(worker)
                    data["left"].append(left)
                    data["right"].append(left + count)
                    data["deployment"].append(name)
                    data["label"].append(label(name))
                    data["count"].append(count)
                    data["colour"].append(colours[number % len(colours)])
                    left += count
        return data


def label(name: str) -> str:
    """Return a name for the legend; a long one is truncated, so that the plot has room."""
    return name if len(name) <= MAX_LABEL else f"{name[: MAX_LABEL - 1]}…"


def _append(line: tuple[list[float], list[float]], time: float, value: float | None) -> None:
    """Add a value to a line, which is broken where values are missing."""
    xs, ys = line
    now = 1000 * time
    if xs and now - xs[-1] > 1000 * GAP_S:
        xs.append(xs[-1] + 1)
        ys.append(float("nan"))
    xs.append(now)
    ys.append(float("nan") if value is None else float(value))
