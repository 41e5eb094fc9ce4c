"""The engine of the example: the model of `ngram` in a continuous batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ngram import END, Model, Numbers, Writing

import daskserve as serve
from daskserve.openai import (
    EmbeddingRequest,
    Embeddings,
    GenerationRequest,
    InvalidRequestError,
    Token,
    text_of,
)

#: Maximum length of vectors, because each number needs a random direction for each word in the corpus.
MAX_DIMENSIONS = 256
#: Maximum number of tokens of an answer if the client does not set one.
DEFAULT_MAX_TOKENS = 120


@dataclass
class Answer:
    """The state of one request between the steps of the batch."""

    writing: Writing
    rng: np.random.Generator


class ChatEngine:
    """Answers chats from the paragraphs that it has read.

    Parameters
    ----------
    paragraphs : list of str
        The texts from which the model learns.
    step_s : float
        Minimum duration of a step, as if the model were larger.
    """

    context_length = 4096

    def __init__(self, paragraphs: Sequence[str], step_s: float = 0.0) -> None:
        self._model = Model(paragraphs)
        self._step_s = step_s

    def count_tokens(self, request: GenerationRequest) -> int:
        """Return the length of the prompt."""
        if request.messages is None:
            return len(self._model.tokens(prompt_of(request)))
        return sum(len(self._model.tokens(text_of(each))) for each in request.messages)

    def embed(self, request: EmbeddingRequest) -> Embeddings:
        """Return the vectors of texts."""
        dimensions = request.dimensions or 64
        if dimensions > MAX_DIMENSIONS:
            text = f"'dimensions' must be at most {MAX_DIMENSIONS}, not {dimensions}."
            raise InvalidRequestError(text, param="dimensions", code="invalid_value")
        texts = [each if isinstance(each, str) else "" for each in request.inputs]
        vectors = self._model.embed(texts, dimensions).tolist()
        return Embeddings(vectors, sum(len(self._model.tokens(each)) for each in texts))

    @serve.batching.continuous_batch(
        max_slots=8,
        max_queued=200,
        # The cost of a waiting request is its maximum number of tokens, because waiting tokens scale the
        # replicas.
        cost_fn=lambda request: request.max_tokens or DEFAULT_MAX_TOKENS,
        cost_per_step=0,
        user_fn=lambda request: request.user,
    )
    def generate(self, active: list[serve.batching.ActiveRequest]) -> list[Token]:
        """Make one token for each active request."""
        began = time.perf_counter()
        rows = self._model.steps([each.state.writing for each in active])
        tokens = [self._token(each, row) for each, row in zip(active, rows, strict=True)]
        time.sleep(max(0.0, self._step_s - (time.perf_counter() - began)))
        return tokens

    @generate.prefill
    def _read(self, new: list[serve.batching.ActiveRequest]) -> list[Answer]:
        return [self._answer(each.args[0], each.outputs) for each in new]

    def _answer(self, request: GenerationRequest, outputs: Sequence[Token]) -> Answer:
        if request.messages is None:
            writing = self._model.begin(text=prompt_of(request))
        else:
            asked = [text_of(each) for each in request.messages if each["role"] == "user"]
            writing = self._model.begin(question=" ".join(asked[-2:]))
        for each in outputs:  # it was preempted, and goes on
            self._model.go_on(writing, self._model.id_of(each.text))
        # Clients may send any number, and an error here would fail all requests that are prefilled together.
        seed = None if request.seed is None else request.seed % 2**64
        return Answer(writing, np.random.default_rng(seed))

    def _token(self, active: serve.batching.ActiveRequest, row: Numbers) -> Token:
        request: GenerationRequest = active.args[0]
        answer: Answer = active.state
        chosen = int(answer.rng.choice(len(row), p=tempered(row, request)))
        self._model.go_on(answer.writing, chosen)
        token = Token(self._model.vocabulary[chosen])
        if request.logprobs is not None:
            best = np.argsort(row)[::-1][: request.logprobs]
            token.logprob = float(np.log(row[chosen]))
            token.top_logprobs = [
                (self._model.vocabulary[each], float(np.log(row[each]))) for each in best if row[each] > 0
            ]
        if chosen == END:
            token.finish_reason, token.count = "stop", 0
        elif len(active.outputs) + 1 >= (request.max_tokens or DEFAULT_MAX_TOKENS):
            token.finish_reason = "length"
        if token.finish_reason is not None:
            active.finish()
        return token


def tempered(row: Numbers, request: GenerationRequest) -> Numbers:
    """Return the probabilities from which to draw, by the temperature and top_p of a request."""
    temperature = 0.5 if request.temperature is None else request.temperature
    if temperature < 0.01:
        return np.asarray(np.arange(len(row)) == row.argmax(), dtype=np.float64)
    powered = (row / row.max()) ** (1 / temperature)  # a flat row alone would become all zeros
    if request.top_p is not None and request.top_p < 1:
        order = np.argsort(powered)[::-1]
        before = np.cumsum(powered[order]) - powered[order]
        powered[order[before > request.top_p * powered.sum()]] = 0
    return np.asarray(powered / powered.sum(), dtype=np.float64)


def prompt_of(request: GenerationRequest) -> str:
    """Return the text to complete; the model has no numbers for tokens."""
    return request.prompt if isinstance(request.prompt, str) else ""


def config(paragraphs: Sequence[str], step_s: float = 0.0, **deployment: Any) -> dict[str, Any]:
    """Return the model for `daskserve.openai.build_app`."""
    args = {"paragraphs": list(paragraphs), "step_s": step_s}
    return {"engine": ChatEngine, "args": args, "deployment": deployment}
