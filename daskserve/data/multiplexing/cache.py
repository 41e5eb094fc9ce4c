"""Decides which models a replica keeps, and which one it drops for the next model.

Problem: if requests for rare models keep coming, dropping the least recently used model is wrong: each rare
model would push out a popular one that is idle at the moment. Counts alone would also be wrong: a model that
was popular yesterday would stay forever. Choice: the replica drops the least recently used model, unless it
is clearly more popular than another unused one. Popularity is a count of uses. It halves with further uses of
any model, and is remembered for a while after a model is dropped. As long as no model is used much more than
the others, this is exactly LRU.

The code is pure: it uses neither clocks nor locks. A model occupies its place until it is unloaded.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

ModelState: TypeAlias = Literal["queued", "loading", "loaded", "leaving"]
#: The states of a model: it waits for a place, is being loaded, can be used, is being unloaded.
QUEUED: Final = "queued"
LOADING: Final = "loading"
LOADED: Final = "loaded"
LEAVING: Final = "leaving"

#: A model is clearly more popular than another one if it exceeds the other by this number of uses and this
#: factor.
MARGIN: Final = 2.0
FACTOR: Final = 1.25
#: A count halves after this number of uses for each kept model, or for 8 models if there are fewer.
HALF_LIFE_USES: Final = 64
#: Number of least recently used models that are compared.
COMPARED: Final = 64
#: The counts of dropped models are remembered for this many models per kept model, but for at least the
#: second number and at most the third.
REMEMBERED: Final = (10, 256, 10_000)


@dataclass(eq=False, slots=True)
class CachedModel:
    """One model, from its first request until it is unloaded."""

    id: str
    state: ModelState = QUEUED
    #: The loaded object, which may be None, and whether there is one.
    model: Any = None
    has_model: bool = False
    size_bytes: int = 0
    #: The numbers of the requests that use it.
    holders: set[int] = field(default_factory=set)
    #: The number of callers that wait for its load.
    waiting: int = 0
    #: When it was last used, on the clock of the caller.
    used_at: float = 0.0
    count: float = 0.0
    counted_at: int = 0

    def __repr__(self) -> str:
        return f"<{self.id} {self.state} holders={len(self.holders)} waiting={self.waiting}>"


class ModelCache:
    """The models of one multiplexed function in one replica.

    Parameters
    ----------
    max_models, max_bytes
        The limits of loaded models; None for no limit.
    pinned : collection of str
        Ids of models that are never dropped.
    """

    def __init__(
        self,
        max_models: int | None = None,
        max_bytes: int | None = None,
        pinned: Collection[str] = (),
    ) -> None:
        self.max_models = max_models
        self.max_bytes = max_bytes
        self.pinned = frozenset(pinned)
        #: The models, the least recently used first.
        self.models: OrderedDict[str, CachedModel] = OrderedDict()
        #: The models that are being unloaded.
        self.leaving: list[CachedModel] = []
        self._uses = 0
        #: The number of `models` that have a place, and their total size.
        self._kept = self._kept_bytes = 0
        #: The size of the model that was loaded last; None before the first load.
        self._last_bytes: int | None = None
        #: The count and the size of dropped models.
        self._dropped: OrderedDict[str, tuple[float, int, int]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<ModelCache {list(self.models.values())!r} leaving={self.leaving!r}>"

    # ---- uses

    def use(self, model_id: str, now: float) -> CachedModel | None:
        """Count a use of a model; return it, or None if it is neither loaded nor expected."""
        self._uses += 1
        entry = self.models.get(model_id)
        if entry is None:
            count, size_bytes, at = self._dropped.get(model_id, (0.0, 0, 0))
            self._remember(model_id, self._decayed(count, at) + 1, size_bytes)
            return None
        self.models.move_to_end(model_id)
        entry.count, entry.counted_at = self.popularity(entry) + 1, self._uses
        entry.used_at = now
        return entry

    def expect(self, model_id: str, now: float) -> CachedModel:
        """Add a model that is to be loaded; it waits for a place."""
        entry = self.models[model_id] = CachedModel(model_id)
        entry.used_at = now
        entry.count, entry.size_bytes, entry.counted_at = self._dropped.pop(model_id, (1.0, 0, self._uses))
        return entry

    def popularity(self, entry: CachedModel) -> float:
        """Return the decayed number of uses of a model."""
        return self._decayed(entry.count, entry.counted_at)

    def _decayed(self, count: float, at: int) -> float:
        half_life = HALF_LIFE_USES * max(8, len(self.models))
        return count * math.exp2((at - self._uses) / half_life)

    def _remember(self, model_id: str, count: float, size_bytes: int = 0) -> None:
        self._dropped[model_id] = (count, size_bytes, self._uses)
        self._dropped.move_to_end(model_id)
        each, least, most = REMEMBERED
        while len(self._dropped) > min(most, max(least, each * len(self.models))):
            self._dropped.popitem(last=False)

    # ---- room

    def admit(self, entry: CachedModel) -> None:
        """Give a model a place; the model may be loaded once `must_wait` is False."""
        entry.size_bytes = (self._expected(entry) or 0) if self.max_bytes is not None else 0
        entry.state = LOADING
        self._kept += 1
        self._kept_bytes += entry.size_bytes

    def must_wait(self) -> bool:
        """Return whether models that are being unloaded still hold the places of others."""
        if not self.leaving:
            return False
        count = self._kept + len(self.leaving)
        size = self._kept_bytes + sum(each.size_bytes for each in self.leaving)
        return (self.max_models is not None and count > self.max_models) or (
            self.max_bytes is not None and size > self.max_bytes
        )

    def _expected(self, entry: CachedModel) -> int | None:
        """Return the last known size of a model, or else the mean size of loaded models; None if unknown."""
        if entry.size_bytes:
            return entry.size_bytes
        sizes = [each.size_bytes for each in self.models.values() if each.state == LOADED]
        return sum(sizes) // len(sizes) if sizes else self._last_bytes

    @property
    def is_too_large(self) -> bool:
        """Whether the models exceed ``max_bytes``."""
        return self.max_bytes is not None and self._kept_bytes > self.max_bytes

    def victims(self, entry: CachedModel, requesters: Collection[int] = ()) -> list[CachedModel] | None:
        """Return the models to drop for one that waits; None if it has to wait because all models are in use.

        The first candidates are models that load although no request waits for them. Unused models come next,
        then models that are used only by requests that wait for this model.
        """
        count, size = self._kept, self._kept_bytes
        found: list[CachedModel] = []
        while not self._fits(entry, count, size):
            victim = self._victim([entry, *found], requesters)
            if victim is None:
                return None
            found.append(victim)
            count, size = count - 1, size - victim.size_bytes
        return found

    def surplus(self, *spared: CachedModel) -> list[CachedModel]:
        """Return the models to drop because loaded models are larger than expected."""
        size = self._kept_bytes
        found: list[CachedModel] = []
        while self.max_bytes is not None and size > self.max_bytes:
            victim = self._victim([*spared, *found])
            if victim is None:
                break
            found.append(victim)
            size -= victim.size_bytes
        return found

    def _fits(self, entry: CachedModel, count: int, size: int) -> bool:
        if self.max_models is not None and count >= self.max_models:
            return False
        if self.max_bytes is None or not count:
            return True
        # While no size is known, drop one model at a time.
        expected = self._expected(entry)
        return expected is not None and size + expected <= self.max_bytes

    def _victim(self, spared: Sequence[CachedModel], requesters: Collection[int] = ()) -> CachedModel | None:
        # A model with waiting callers is kept, whether it is loaded or not.
        idle = [
            each
            for each in self.models.values()
            if each.state != QUEUED and not each.waiting and each.id not in self.pinned and each not in spared
        ]
        abandoned = [each for each in idle if each.state == LOADING]
        if abandoned:
            return abandoned[0]
        unused = [each for each in idle if not each.holders]
        if unused:
            return self._least_worth(unused[:COMPARED])
        return next((each for each in idle if all(one in requesters for one in each.holders)), None)

    def _least_worth(self, unused: Iterable[CachedModel]) -> CachedModel:
        chosen, *others = unused
        worth = self.popularity(chosen)
        for each in others:
            if worth <= MARGIN:
                break
            if (other := self.popularity(each)) * FACTOR + MARGIN < worth:
                chosen, worth = each, other
        return chosen

    # ---- changes

    def loaded(self, entry: CachedModel, model: Any, size_bytes: int) -> None:
        """Record that a model is loaded."""
        self._last_bytes = size_bytes
        self._kept_bytes += size_bytes - entry.size_bytes
        entry.state, entry.model, entry.size_bytes, entry.has_model = LOADED, model, size_bytes, True

    def failed(self, entry: CachedModel) -> None:
        """Drop a model that could not be loaded; the next request for it tries again."""
        if self.models.get(entry.id) is entry:
            self._take_out(entry)
            self._remember(entry.id, self.popularity(entry))

    def drop(self, entry: CachedModel) -> None:
        """Stop offering a model; it keeps its place until `left`."""
        self._take_out(entry)
        self._remember(entry.id, self.popularity(entry), entry.size_bytes)
        entry.state = LEAVING
        self.leaving.append(entry)

    def _take_out(self, entry: CachedModel) -> None:
        del self.models[entry.id]
        if entry.state != QUEUED:
            self._kept -= 1
            self._kept_bytes -= entry.size_bytes

    def left(self, entry: CachedModel) -> None:
        """Record that a dropped model is unloaded."""
        entry.model = None
        if entry in self.leaving:
            self.leaving.remove(entry)

    def idle_since(self, before: float) -> list[CachedModel]:
        """Return the models that are not pinned, not in use, and were last used before the given time."""
        return [
            each
            for each in self.models.values()
            if each.state == LOADED
            and not each.holders
            and not each.waiting
            and each.used_at <= before
            and each.id not in self.pinned
        ]
