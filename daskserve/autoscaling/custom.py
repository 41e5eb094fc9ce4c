"""Custom metrics of a backend: how their values are aggregated, and a policy that scales on one of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from daskserve.autoscaling.context import AutoscalingContext, Decision, Policy
from daskserve.common.formatting import counted, shown
from daskserve.common.types import ReplicaTag

T = TypeVar("T")
#: Values by metric name and replica.
PerReplica: TypeAlias = Mapping[str, Mapping[ReplicaTag, float]]


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    try:
        return math.fsum(found) / len(found)
    except OverflowError:
        return math.fsum(each / len(found) for each in found)


#: Functions by the value of the option ``aggregation_function``.
AGGREGATIONS: Mapping[str, Callable[[Iterable[float]], float]] = {"mean": _mean, "max": max, "min": min}
#: Functions by the value of the argument ``across`` of `custom_metric`.
ACROSS: Mapping[str, Callable[[Iterable[float]], float]] = {"sum": math.fsum, "mean": _mean, "max": max}


class _LazyMapping(Mapping[str, T]):
    """A mapping that computes each value on first access, because few policies use all metrics."""

    def __init__(self, names: Iterable[str], compute: Callable[[str], T]) -> None:
        self._names = dict.fromkeys(names)
        self._compute = compute
        self._computed: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._computed:
            self._computed[name] = self._compute(name)
        return self._computed[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return repr(dict(self))


@dataclass(frozen=True, slots=True)
class CustomViews:
    """Custom metrics at one time: the newest values, aggregated over time, and also over all replicas."""

    newest: PerReplica = field(default_factory=dict)
    aggregated: PerReplica = field(default_factory=dict)
    overall: Mapping[str, float] = field(default_factory=dict)


class CustomMetrics:
    """The custom metrics of the look-back period, for at most ``most`` samples."""

    def __init__(self, most: int) -> None:
        self._seen: deque[tuple[float, PerReplica]] = deque(maxlen=most)

    def observe(self, at: float, values: PerReplica) -> None:
        """Add the values that the running replicas reported."""
        self._seen.append((at, values))

    def clear(self) -> None:
        """Drop all values."""
        self._seen.clear()

    def views(self, horizon: float, aggregation: str) -> CustomViews:
        """Return the values since ``horizon``, without replicas that have stopped reporting."""
        while self._seen and self._seen[0][0] <= horizon:
            self._seen.popleft()
        if not self._seen or not self._seen[-1][1]:
            return CustomViews()
        newest = self._seen[-1][1]
        aggregate = AGGREGATIONS[aggregation]
        # A copy, because values keep arriving while a user's policy runs in its thread.
        seen = [values for _, values in list(self._seen)]

        def over_time(name: str) -> Mapping[ReplicaTag, float]:
            reported = [each[name] for each in seen if name in each]
            return {
                replica: aggregate([each[replica] for each in reported if replica in each])
                for replica in newest[name]
            }

        aggregated = _LazyMapping(newest, over_time)
        return CustomViews(
            newest, aggregated, _LazyMapping(newest, lambda name: aggregate(aggregated[name].values()))
        )


def custom_metric(metric: str, target: float, across: str = "sum") -> Policy:
    """Return a policy that runs one replica per ``target`` units of a custom metric.

    Parameters
    ----------
    metric : str
        A name that ``record_autoscaling_stats`` returns a value for.
    target : float
        Value of the metric per replica.
    across : str
        How the values of the replicas are combined: ``"sum"`` if each replica reports its own share,
        ``"mean"`` or ``"max"`` if all report the same thing, such as a queue that they share.

    Raises
    ------
    ValueError
        An argument is invalid.
    """
    if not isinstance(metric, str) or not metric:
        raise ValueError(f"metric is {metric!r}; give a name that record_autoscaling_stats returns")
    if isinstance(target, bool) or not isinstance(target, int | float) or not 0 < target < math.inf:
        raise ValueError(f"the target of {metric!r} is {target!r}; give a number above 0")
    if across not in ACROSS:
        raise ValueError(f"across is {across!r}; give one of {', '.join(ACROSS)}")

    def decide(context: AutoscalingContext) -> Decision:
        current, running = context.target_num_replicas, context.current_num_replicas
        values = context.aggregated_metrics.get(metric, {})
        if not values:
            others = ", ".join(sorted(context.aggregated_metrics))
            known = f"; they report {others}" if others else ""
            none = f"none of {counted(running, 'replica')} reports {metric}{known}"
            return Decision(current, f"{none}, so {current} stay")
        value = max(0.0, ACROSS[across](values.values()))
        wanted = context.whole_replicas(value / target)
        reason = (
            f"{across} of {metric} over {counted(len(values), 'replica')} is {shown(value)}, "
            f"{shown(target)} per replica wanted"
        )
        missing = running - len(values)
        if missing > 0 and wanted < current:
            # The values that are missing may be the largest.
            wanted = current
            reason = f"{reason}; {missing} report nothing, so not fewer than {current}"
        return Decision(wanted, f"{reason}: {wanted}")

    return decide
