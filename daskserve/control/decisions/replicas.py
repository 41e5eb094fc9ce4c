"""Finds replicas by name. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from daskserve.common.types import ReplicaState, short_tag
from daskserve.control.records.records import ReplicaRecord
from daskserve.control.records.state import State
from daskserve.errors import NotFoundError

#: Maximum number of names that an error lists, and maximum length of an unknown name in it.
MAX_SHOWN, MAX_LENGTH = 5, 200


def named_replicas(state: State, name: str) -> list[ReplicaRecord]:
    """Return the replica with a tag, or the replicas of a deployment, first those that do not serve.

    Parameters
    ----------
    name : str
        The full or short tag of a replica, or the tag of a deployment, which may begin with ``default/``.

    Raises
    ------
    NotFoundError
        There is no such replica with a process.
    """
    placed = [each for each in state.replicas.values() if each.worker is not None]
    exact = [each for each in placed if name in (each.tag, short_tag(each.tag))]
    found = exact[:1] or [each for each in placed if name in _names_of(each)]
    if found:
        # A replica that does not serve is probably the one that the user wants to inspect.
        return sorted(found, key=lambda each: each.state is ReplicaState.RUNNING)
    if any(name in (each.tag, short_tag(each.tag), *_names_of(each)) for each in state.replicas.values()):
        raise NotFoundError(f"{name!r} has no worker yet; `daskserve status` says what it waits for.")
    known = {short_tag(each.tag) for each in placed} | {short_tag(each.backend) for each in placed}
    near = difflib.get_close_matches(name, sorted(known), MAX_SHOWN, cutoff=0.0)
    what = f"the nearest are: {', '.join(near)}" if near else "none runs"
    raise NotFoundError(f"There is no replica, or deployment with replicas, {name[:MAX_LENGTH]!r}; {what}.")


def busiest(replicas: Sequence[ReplicaRecord], actors: Mapping[str, Mapping[str, Any]]) -> ReplicaRecord:
    """Return the replica with the most requests, or the first one that did not answer.

    Parameters
    ----------
    actors : mapping
        The workers' reports of their actors, by the tags of replicas.
    """

    def requests(replica: ReplicaRecord) -> float:
        found = actors.get(replica.tag)
        return float("inf") if found is None else float(found.get("ongoing", 0))

    return max(replicas, key=requests)


def _names_of(replica: ReplicaRecord) -> tuple[str, ...]:
    tag = short_tag(replica.backend)
    # Deployments of the default application have no prefix, but other commands write one.
    return tag, f"default/{tag}" if "/" not in tag else tag
