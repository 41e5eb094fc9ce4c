"""An engine for models of the transformers library, in a continuous batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import daskserve as serve
from daskserve.openai import GenerationRequest, InvalidRequestError, Token, text_of


@dataclass
class Writing:
    """The state of a request between the steps of the batch."""

    tokens: list[int]
    generator: torch.Generator
    #: The keys and values of the tokens that the model has seen.
    cache: Any = None
    #: New tokens whose text is not complete yet, such as half of a character.
    unsent: list[int] = field(default_factory=list)


class TransformersEngine:
    """Generates with a causal language model.

    Each request keeps its own cache, so requests of all lengths share the steps, and each is one call of the
    model. This is simple, and suits CPUs; engines such as vLLM join the caches of all requests.

    Parameters
    ----------
    model : str
        A folder or the name of a model, as `AutoModelForCausalLM.from_pretrained` takes it.
    device : str
        Where it runs.
    threads : int, optional
        How many threads torch takes.
    """

    def __init__(self, model: str, device: str = "cpu", threads: int | None = None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._model = AutoModelForCausalLM.from_pretrained(model).to(device).eval()
        self._device = device
        self.context_length = int(self._model.config.max_position_embeddings)

    def count_tokens(self, request: GenerationRequest) -> int:
        """Return the length of the prompt, and keep its tokens."""
        if request.tokens is None:
            request.tokens = self._encoded(request)
            # The check is here, because an error in a step would fail all requests of the batch.
            size = int(self._model.config.vocab_size)
            if not request.tokens or not all(0 <= each < size for each in request.tokens):
                text = f"The prompt must have tokens, with numbers from 0 to {size - 1}."
                raise InvalidRequestError(text, param="prompt" if request.messages is None else "messages")
        return len(request.tokens)

    def _encoded(self, request: GenerationRequest) -> list[int]:
        if request.messages is None:
            prompt = request.prompt or ""
            return prompt if isinstance(prompt, list) else list(self._tokenizer.encode(prompt))
        messages = [{"role": each["role"], "content": text_of(each)} for each in request.messages]
        if self._tokenizer.chat_template is None:
            lines = [f"{each['role']}: {each['content']}\n" for each in messages]
            return list(self._tokenizer.encode("".join(lines) + "assistant:"))
        text = self._tokenizer.apply_chat_template(
            messages, tools=request.tools, add_generation_prompt=True, tokenize=False
        )
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    @serve.batching.continuous_batch(
        max_slots=8,
        max_queued=200,
        cost_fn=lambda request: len(request.tokens) + (request.max_tokens or 0),
        cost_per_step=0,
        user_fn=lambda request: request.user,
    )
    @torch.inference_mode()
    def generate(self, active: list[serve.batching.ActiveRequest]) -> list[Token]:
        """Make one token for each active request."""
        return [self._step(each) for each in active]

    @generate.prefill
    def _read(self, new: list[serve.batching.ActiveRequest]) -> list[Writing]:
        return [self._writing(each.args[0], each.outputs) for each in new]

    def _writing(self, request: GenerationRequest, outputs: Sequence[Token]) -> Writing:
        generator = torch.Generator(self._device)
        if request.seed is not None:
            generator.manual_seed(request.seed)
        made = [each.data for each in outputs]  # it was preempted, and goes on
        return Writing([*request.tokens, *made], generator)

    def _step(self, active: serve.batching.ActiveRequest) -> Token:
        request: GenerationRequest = active.args[0]
        writing: Writing = active.state
        # The first step gets all tokens, later ones only the last, because the others are in the cache.
        tokens = writing.tokens if writing.cache is None else writing.tokens[-1:]
        inputs = torch.tensor([tokens], device=self._device)
        found = self._model(inputs, past_key_values=writing.cache, use_cache=True)
        writing.cache = found.past_key_values
        logits = found.logits[0, -1].float()
        chosen = choose(logits, request, writing.generator)
        writing.tokens.append(chosen)
        token = Token(self._text(writing, chosen), data=chosen)
        if request.logprobs is not None:
            self._report(token, torch.log_softmax(logits, dim=-1), chosen, request.logprobs)
        if chosen == self._tokenizer.eos_token_id:
            token.text, token.finish_reason = "", "stop"
            active.finish()
        elif request.max_tokens is not None and len(active.outputs) + 1 >= request.max_tokens:
            token.finish_reason = "length"
            active.finish()
        return token

    def _text(self, writing: Writing, chosen: int) -> str:
        """Return the text that a token adds; empty while a character is incomplete."""
        writing.unsent.append(chosen)
        text: str = self._tokenizer.decode(writing.unsent)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and len(writing.unsent) < 8:
            return ""
        before = writing.tokens[-len(writing.unsent) - 1 : -len(writing.unsent)]
        # Some tokenizers drop the space at the beginning of a text, so decode the token before with it.
        prefix: str = self._tokenizer.decode(before)
        whole: str = self._tokenizer.decode([*before, *writing.unsent])
        writing.unsent.clear()
        return whole[len(prefix) :] if whole.startswith(prefix) else text

    def _report(self, token: Token, logprobs: torch.Tensor, chosen: int, count: int) -> None:
        token.logprob = float(logprobs[chosen])
        best = torch.topk(logprobs, count) if count else ([], [])
        token.top_logprobs = [
            (self._tokenizer.decode([int(index)]), float(value)) for value, index in zip(*best, strict=True)
        ]


def choose(logits: torch.Tensor, request: GenerationRequest, generator: torch.Generator) -> int:
    """Return the next token, by the temperature and top_p of a request."""
    temperature = 1.0 if request.temperature is None else request.temperature
    if temperature < 0.01:
        return int(logits.argmax())
    probabilities = torch.softmax(logits / temperature, dim=-1)
    if request.top_p is not None and request.top_p < 1:
        ordered, order = probabilities.sort(descending=True)
        before = ordered.cumsum(dim=-1) - ordered
        probabilities[order[before > request.top_p]] = 0
    return int(torch.multinomial(probabilities, 1, generator=generator))
