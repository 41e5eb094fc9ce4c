"""The messages of the status: why a backend waits, and why its replicas fail. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from daskserve.common.formatting import counted, shown, shown_size
from daskserve.common.types import BackendTag, ReplicaState, short_tag
from daskserve.control.backend import progress
from daskserve.control.backend.step import NEW_WORKER_S
from daskserve.control.observed.observed import KEPT_DEAD, DeadReplica, Observed
from daskserve.control.placement.placement import capacity
from daskserve.control.records.model_decisions import text_of
from daskserve.control.records.records import BackendRecord, ReplicaRecord
from daskserve.control.records.state import State
from daskserve.control.views.rollouts import model_texts, rollout_text

#: Time after which messages mention a replica that is not placed or started.
SLOW_S = 30.0
#: Number of restarts that count as a restart loop, and the window within which they must happen, in seconds.
LOOP_RESTARTS, LOOP_S = 3, 600.0


def message_of(
    observed: Observed, backend: BackendRecord, replicas: Iterable[ReplicaRecord], wall: float
) -> str:
    """Return why a backend waits (for room, a slow replica, an update), or why the last goal failed.

    Parameters
    ----------
    wall : float
        The time in seconds since the epoch.
    """
    replicas, notes = list(replicas), observed.notes_of(backend.tag)
    found = [] if notes.waiting is None else [notes.waiting]
    found += [text] if (text := slow_text(observed, backend, replicas, wall)) else []
    found += [text] if (text := progress.busy_text(observed, backend, replicas)) else []
    if backend.canary is not None:
        found.append(rollout_text(observed, backend, replicas))
    elif backend.goal is not None and any(each.version != backend.version for each in replicas):
        done = progress.running(backend, replicas)
        found.append(f"{done} of {counted(backend.needed_replicas, 'replica is', 'replicas are')} updated")
    if notes.full_since is not None:
        surge = backend.config.surge(1)
        cause = "no room for a new replica beside the old ones" if surge else "max_surge is 0"
        late = (
            f", once no worker has joined for {shown(NEW_WORKER_S)} s"
            if surge and observed.is_adaptive
            else ""
        )
        count = notes.drained_at_once
        is_one = backend.gang_size == 1 and not backend.bundles
        where = " of one worker" if is_one else ""
        drained = "one old replica" if count == 1 else f"{count} old replicas{where}"
        found.insert(0, f"{cause}: draining {drained} at a time{late}")
    if text := observed.router_errors.text_of(backend.tag, wall):
        found.append(text)
    if text := loop_text(notes.dead, backend, wall, has_reason=notes.failures > 0):
        found.append(text)
    # Each text may contain a traceback after its first line.
    parts = [each.partition("\n") for each in found]
    text = "\n".join(["; ".join(first for first, _, _ in parts), *(more for _, _, more in parts if more)])
    return text or backend.last_error


def with_models(state: State, observed: Observed, tag: BackendTag, message: str) -> str:
    """Return a message with the status text of a deployment's models added."""
    record, backend = state.models.get(tag), state.backends.get(tag)
    rolling = {} if backend is None else model_texts(observed, backend, record)
    parts = [text_of(record, observed.model_problems.get(tag, "")), *slow_models(state, observed, tag)]
    text = "; ".join(filter(None, [*parts, *(f"model {name!r}: {each}" for name, each in rolling.items())]))
    first, line, rest = message.partition("\n")
    return "; ".join(filter(None, (first, text))) + line + rest


def slow_models(state: State, observed: Observed, tag: BackendTag) -> list[str]:
    """Return which replicas have been loading a version of a model for a long time."""
    found = []
    for replica in state.replicas_of(tag):
        report = observed.models.get(replica.tag)
        for key, for_s in {} if report is None else report.loading.items():
            if for_s >= SLOW_S:
                since = f"for more than {shown(SLOW_S)} s"
                found.append(
                    f"replica {short_tag(replica.tag)!r} has been loading model version {key} {since}"
                )
    return found


def slow_text(
    observed: Observed, backend: BackendRecord, replicas: Sequence[ReplicaRecord], wall: float
) -> str:
    """Return how many replicas have been waiting or starting for a long time, and what they need."""
    has = ("replica has", "replicas have")
    late = [each.state for each in replicas if each.moved_at and wall - each.moved_at >= SLOW_S]
    unplaced, starting = late.count(ReplicaState.SHOULD_START), late.count(ReplicaState.STARTING)
    if unplaced:
        needed = {} if backend.is_deleting else dict(replicas[0].demand)
        for bundle in backend.bundles[1:]:
            needed = {name: needed.get(name, 0) + bundle.get(name, 0) for name in {*needed, *bundle}}
        offered = [capacity(each) for each in observed.usable_workers() if not each.is_system]
        have = {name: sum(each.get(name, 0) for each in offered) for name in needed}
        return (
            f"{counted(unplaced, *has)} waited for a worker for more than {shown(SLOW_S)} s; resources "
            f"required for each replica: {_amounts(needed)}; resources of all workers: {_amounts(have)}"
        )
    if starting and (starting > 1 or not any(each.tag in observed.busy for each in replicas)):
        return (
            f"{counted(starting, *has)} taken more than {shown(SLOW_S)} s to start, perhaps because of a "
            "slow __init__ or reconfigure()"
        )
    return ""


def _amounts(amounts: Mapping[str, float]) -> str:
    return ", ".join(
        f"{name} {shown_size(amount) if name == 'memory' else shown(amount)}"
        for name, amount in sorted(amounts.items())
    )


def loop_text(dead: Sequence[DeadReplica], backend: BackendRecord, wall: float, *, has_reason: bool) -> str:
    """Return how often, for how long and why replicas restart in a loop; empty if they do not restart in a
    loop.

    ``has_reason`` is whether the message already contains the reason. Replicas that end at the same time, for
    example because a worker was lost, count once.
    """
    # A clock that was set back has deaths of the future.
    lately = [each for each in dead if abs(wall - each.at) < LOOP_S and each.version == backend.version]
    times = {each.at for each in lately}
    if len(times) < min(max(LOOP_RESTARTS, backend.num_replicas), KEPT_DEAD):
        return ""
    minutes, seconds = divmod(round(max(times) - min(times)), 60)
    span = f"{minutes} min" if minutes else f"{max(1, seconds)} s"
    count = f"{len(times)}{' times or more' if len(dead) == KEPT_DEAD else ' times'}"
    who = "replicas " if backend.num_replicas > 1 else ""
    why = "" if has_reason else f", last because {lately[-1].reason}"
    return f"restart loop: {who}restarted {count} in {span}{why}"
