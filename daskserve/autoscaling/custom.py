"""What a backend's own code measures: how values are taken together, and a policy by one of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from daskserve.autoscaling.context import AutoscalingContext, Decision, Policy
from daskserve.types import ReplicaTag

T = TypeVar("T")
#: By name, what each replica says of itself.
PerReplica: TypeAlias = Mapping[str, Mapping[ReplicaTag, float]]


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    try:
        return math.fsum(found) / len(found)
    except OverflowError:
        return math.fsum(each / len(found) for each in found)


#: By the words of ``aggregation_function``.
WAYS: Mapping[str, Callable[[Iterable[float]], float]] = {"mean": _mean, "max": max, "min": min}
#: By the words of `custom_metric`.
ACROSS: Mapping[str, Callable[[Iterable[float]], float]] = {"sum": math.fsum, "mean": _mean, "max": max}


class _ByName(Mapping[str, T]):
    """A mapping whose values are worked out when they are asked for: few policies go by all of them."""

    def __init__(self, names: Iterable[str], work_out: Callable[[str], T]) -> None:
        self._names = dict.fromkeys(names)
        self._work_out = work_out
        self._found: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._found:
            self._found[name] = self._work_out(name)
        return self._found[name]

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
    """Values at one time: the newest, over a time, and that over all replicas."""

    newest: PerReplica = field(default_factory=dict)
    aggregated: PerReplica = field(default_factory=dict)
    overall: Mapping[str, float] = field(default_factory=dict)


class CustomMetrics:
    """The values of the look-back period, at most ``most`` times."""

    def __init__(self, most: int) -> None:
        self._seen: deque[tuple[float, PerReplica]] = deque(maxlen=most)

    def observe(self, at: float, values: PerReplica) -> None:
        """Take in what the running replicas told."""
        self._seen.append((at, values))

    def clear(self) -> None:
        """Forget all of it."""
        self._seen.clear()

    def views(self, horizon: float, way: str) -> CustomViews:
        """Return what is known since ``horizon``. A replica that tells nothing any more is in none of it."""
        while self._seen and self._seen[0][0] <= horizon:
            self._seen.popleft()
        if not self._seen or not self._seen[-1][1]:
            return CustomViews()
        newest = self._seen[-1][1]
        together = WAYS[way]
        # A copy, because values go on coming in while the policy of a user's is asked in its thread.
        seen = [values for _, values in list(self._seen)]

        def over_time(name: str) -> Mapping[ReplicaTag, float]:
            told = [each[name] for each in seen if name in each]
            return {
                replica: together([each[replica] for each in told if replica in each])
                for replica in newest[name]
            }

        aggregated = _ByName(newest, over_time)
        return CustomViews(
            newest, aggregated, _ByName(newest, lambda name: together(aggregated[name].values()))
        )


def custom_metric(metric: str, target: float, across: str = "sum") -> Policy:
    """Return a policy that has one replica per ``target`` of what the backend's own code measures.

    Parameters
    ----------
    metric : str
        A name that ``record_autoscaling_stats`` gives a value for.
    target : float
        How much one replica is for.
    across : str
        How the replicas' values become one: ``"sum"`` where each tells of its own share, ``"mean"`` or
        ``"max"`` where all of them tell of the same thing, such as a queue that they share.

    Raises
    ------
    ValueError
        One of these is of no use.
    """
    if not isinstance(metric, str) or not metric:
        raise ValueError(f"metric is {metric!r}; it has to be a name that record_autoscaling_stats returns")
    if isinstance(target, bool) or not isinstance(target, int | float) or not 0 < target < math.inf:
        raise ValueError(f"the target of {metric!r} is {target!r}; it has to be a number above 0")
    if across not in ACROSS:
        raise ValueError(f"across is {across!r}; it has to be one of {', '.join(ACROSS)}")

    def decide(context: AutoscalingContext) -> Decision:
        present, running = context.target_num_replicas, context.current_num_replicas
        values = context.aggregated_metrics.get(metric, {})
        if not values:
            others = ", ".join(sorted(context.aggregated_metrics))
            known = f"; they tell of {others}" if others else ""
            return Decision(
                present, f"none of {running} replicas tells its {metric}{known}, so {present} stay"
            )
        value = max(0.0, ACROSS[across](values.values()))
        wanted = context.whole_replicas(value / target)
        reason = (
            f"{across} of {metric} over {len(values)} replicas is {value:g}, {target:g} per replica wanted"
        )
        missing = running - len(values)
        if missing > 0 and wanted < present:
            # What they do not tell may well be the most.
            wanted = present
            reason = f"{reason}; {missing} tell nothing, so not fewer than {present}"
        return Decision(wanted, f"{reason}: {wanted}")

    return decide
