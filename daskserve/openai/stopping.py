"""Finds stop strings in a text that arrives in pieces, without sending the start of one too early."""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Passes on text up to the first stop string.

    Attributes
    ----------
    found : bool
        Whether a stop string was there. No text follows.
    held : str
        The end of the text so far, which may be the beginning of a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self.held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """Add text; return the part that cannot belong to a stop string."""
        if not self._stops:
            return text
        text = self.held + text
        places = [place for each in self._stops if (place := text.find(each)) >= 0]
        if places:
            self.found, self.held = True, ""
            return text[: min(places)]
        keep = max(_overlap(text, each) for each in self._stops)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def end(self) -> str:
        """Return the text that was held back, because the text has ended without a stop string."""
        held, self.held = self.held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of a text are the beginning of a stop string."""
    place = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while place >= 0:
        if stop.startswith(text[place:]):
            return len(text) - place
        place = text.find(stop[0], place + 1)
    return 0
