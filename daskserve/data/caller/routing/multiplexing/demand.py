"""The share of each model in the recent requests to a backend."""

from __future__ import annotations

#: Counts are halved after this many requests, and small ones dropped.
WINDOW = 2048


class ModelDemand:
    """Counts the requests of one process for the models of one backend. Pure."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}
        self._total = 0.0
        self._until_halved = WINDOW

    def note(self, key: str) -> None:
        """Count a request."""
        self._counts[key] = self._counts.get(key, 0.0) + 1
        self._total += 1
        self._until_halved -= 1
        if not self._until_halved:
            self._until_halved = WINDOW
            self._counts = {key: count / 2 for key, count in self._counts.items() if count >= 2}
            self._total = sum(self._counts.values())

    def share(self, key: str) -> float:
        """Return the share of a model; 0 if it is not known."""
        return self._counts.get(key, 0.0) / self._total if self._total else 0.0
