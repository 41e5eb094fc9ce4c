"""A small language model in numpy: it continues a text like the texts that it has read.

It has read a corpus of paragraphs. The next token is drawn from all places in the corpus where the last
tokens occur. A place is more likely if its paragraph fits the question. So the model knows only its corpus,
and joins sentences that do not belong together: it is only for trying out a server.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

#: Words and signs, each with the space before it, so that joined tokens are the text again.
TOKEN = re.compile(r"\s?[\w'-]+|\s?[^\w\s]|\s")
WORD = re.compile(r"[a-z0-9_]{3,}")
#: The token at the end of each paragraph.
END = 0
#: If fewer places match, the model compares fewer of the last tokens.
ENOUGH_PLACES = 3
#: Weight of the difference between paragraphs that fit well and paragraphs that fit less.
FOCUS = 3.0

Numbers = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass
class Writing:
    """A text that the model writes.

    Attributes
    ----------
    weights : array
        How well each paragraph fits.
    places : array
        The places in the corpus from which the next token is drawn.
    last : list of int
        The last tokens.
    """

    weights: Numbers
    places: Indices
    last: list[int] = field(default_factory=list)


class Model:
    """Reads paragraphs, and writes like them."""

    def __init__(self, paragraphs: Sequence[str]) -> None:
        texts = [TOKEN.findall(each) for each in paragraphs]
        self.vocabulary = ["", *sorted({token for text in texts for token in text})]
        self._ids = {token: number for number, token in enumerate(self.vocabulary)}
        lines = [[*(self._ids[token] for token in text), END] for text in texts]
        self._corpus: Indices = np.array([END, *(each for line in lines for each in line)], dtype=np.int64)
        owners = [number for number, line in enumerate(lines) for _ in line]
        self._owners: Indices = np.array([0, *owners], dtype=np.int64)
        # The places after each token, in one array: those of token t are at starts[t]:starts[t + 1].
        self._order: Indices = np.argsort(self._corpus[:-1], kind="stable") + 1
        self._starts: Indices = np.searchsorted(
            np.sort(self._corpus[:-1]), np.arange(len(self.vocabulary) + 1)
        )
        self._read_words(paragraphs)

    def _read_words(self, paragraphs: Sequence[str]) -> None:
        words = [WORD.findall(each.lower()) for each in paragraphs]
        self._words = {word: n for n, word in enumerate(sorted({w for each in words for w in each}))}
        self._counts: Numbers = np.zeros((len(paragraphs), len(self._words)), dtype=np.float64)
        for row, each in enumerate(words):
            for word in each:
                self._counts[row, self._words[word]] += 1
        self._rarity: Numbers = np.log(len(paragraphs) / np.maximum((self._counts > 0).sum(axis=0), 1))
        scaled = np.log1p(self._counts) * self._rarity
        self._scaled: Numbers = scaled / np.maximum(np.linalg.norm(scaled, axis=1, keepdims=True), 1e-9)

    # ---- texts and tokens

    def tokens(self, text: str) -> list[str]:
        """Return the tokens of a text; joined, they are the text."""
        return TOKEN.findall(text)

    def id_of(self, token: str) -> int:
        """Return the number of a token; that of the end if it is unknown."""
        return self._ids.get(token, END)

    def embed(self, texts: Sequence[str], dimensions: int) -> Numbers:
        """Return a vector of length one for each text; texts with rare words in common have similar ones."""
        seeded = np.random.default_rng(7)
        directions = seeded.standard_normal((len(self._words), dimensions))
        vectors: Numbers = np.stack([self._bag(each) for each in texts]) @ directions
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
        return vectors

    def _bag(self, text: str) -> Numbers:
        bag = np.zeros(len(self._words))
        for word in WORD.findall(text.lower()):
            if word in self._words:
                bag[self._words[word]] += 1
        scaled: Numbers = np.log1p(bag) * self._rarity
        return scaled

    # ---- writing

    def begin(self, question: str = "", text: str = "") -> Writing:
        """Return a text that answers a question, or continues a text."""
        fits = self._scaled @ self._bag(question or text)
        best = float(fits.max(initial=0.0))
        weights = np.exp(FOCUS * 4 * (fits / best - 1)) if best > 0 else np.ones(len(fits))
        writing = Writing(weights, self._places_after(END))
        for token in self.tokens(text)[-32:]:
            self.go_on(writing, self.id_of(token))
        return writing

    def steps(self, writings: Sequence[Writing]) -> Numbers:
        """Return the probability of each token to be the next, a row for each text: one step for all."""
        width = len(self.vocabulary)
        places = np.concatenate([each.places for each in writings])
        rows = np.repeat(np.arange(len(writings)), [len(each.places) for each in writings])
        weights = np.concatenate([each.weights[self._owners[each.places]] for each in writings])
        keys = rows * width + self._corpus[places]
        found = np.bincount(keys, weights, minlength=len(writings) * width).reshape(len(writings), width)
        totals: Numbers = found.sum(axis=1, keepdims=True)
        return np.asarray(found / totals, dtype=np.float64)

    def go_on(self, writing: Writing, token: int) -> None:
        """Add a token to a text."""
        writing.last = [*writing.last[-3:], token]
        follows = writing.places[self._corpus[writing.places] == token] + 1
        writing.places = follows[follows < len(self._corpus)]
        if len(writing.places) < ENOUGH_PLACES:
            writing.places = self._fewer(writing)

    def _fewer(self, writing: Writing) -> Indices:
        """Return the places after the longest run of last tokens that occurs often enough."""
        places = self._places_after(writing.last[-1])
        if not len(places):
            return self._places_after(END)
        for back in range(2, len(writing.last) + 1):
            earlier = places - back
            narrower = places[(earlier >= 0) & (self._corpus[earlier] == writing.last[-back])]
            if len(narrower) < ENOUGH_PLACES:
                break
            places = narrower
        return places

    def _places_after(self, token: int) -> Indices:
        return self._order[self._starts[token] : self._starts[token + 1]]


def paragraphs_of(markdown: str) -> list[str]:
    """Return the paragraphs of a page: prose, without code, tables, headings and marks."""
    text = re.sub(r"^```.*?^```", "", markdown, flags=re.DOTALL | re.MULTILINE)
    found = []
    for block in re.split(r"\n\s*\n|\n(?=- )", text):
        if re.match(r"\s*(#|\||<|!|\d+\.)", block):
            continue
        line = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", " ".join(block.split()))
        line = re.sub(r"[*`]+", "", line).removeprefix("- ")
        if len(line) > 30 and line[0].isalnum() and line.endswith((".", "!", "?")):
            found.append(line)
    return found
