"""An engine for vLLM, which batches requests itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from daskserve.openai import GenerationRequest, ModelNotFoundError, Token, text_of


class VLLMEngine:
    """Generates with `AsyncLLM`.

    Give its deployment ``isolation="process"``, because vLLM sets signal handlers, and a GPU, such as
    ``actor_options={"resources": {"GPU": 1}}``.

    Parameters
    ----------
    loras : dict, optional
        The folders of LoRA adapters by name. Name them in ``adapters`` of the model, too, and pass
        ``enable_lora=True``.
    **options
        Those of `AsyncEngineArgs`, such as ``model`` and ``max_model_len``.
    """

    def __init__(self, loras: dict[str, str] | None = None, **options: Any) -> None:
        self._loras = {
            name: LoRARequest(name, number, path)
            for number, (name, path) in enumerate(sorted((loras or {}).items()), 1)
        }
        self._args = AsyncEngineArgs(**options)
        self._made: AsyncLLM | None = None
        self._number = 0

    @property
    def _llm(self) -> AsyncLLM:
        # Made on first use: it needs the event loop of the replica.
        if self._made is None:
            self._made = AsyncLLM.from_engine_args(self._args)
        return self._made

    async def check_health(self) -> None:
        """Raise if the engine is dead; the replica is then replaced."""
        await self._llm.check_health()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Token]:
        """Yield tokens; vLLM ends the request when this generator is closed."""
        self._number += 1
        tokenizer = await self._llm.get_tokenizer()
        made = self._llm.generate(
            prompt_of(request, tokenizer),
            sampling_of(request),
            f"{request.request_id}-{request.choice}-{self._number}",
            lora_request=self._lora(request.adapter),
        )
        is_first = True
        async for output in made:
            token = token_of(output.outputs[0], tokenizer)
            if is_first:
                token.prompt_tokens, is_first = len(output.prompt_token_ids or ()), False
            yield token

    def _lora(self, adapter: str) -> LoRARequest | None:
        if not adapter:
            return None
        if adapter not in self._loras:
            raise ModelNotFoundError(f"There is no adapter {adapter!r}.")
        return self._loras[adapter]


def prompt_of(request: GenerationRequest, tokenizer: Any) -> Any:
    """Return the prompt in a form of vLLM; the template of the model makes it from a conversation."""
    if isinstance(request.prompt, list):
        return {"prompt_token_ids": request.prompt}
    if request.messages is None:
        return request.prompt
    messages = [{**each, "content": text_of(each)} for each in request.messages]
    ids = tokenizer.apply_chat_template(
        messages, tools=request.tools, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return {"prompt_token_ids": ids}


def sampling_of(request: GenerationRequest) -> SamplingParams:
    """Return the parameters of a request."""
    names = ("temperature", "top_p", "seed", "max_tokens", "frequency_penalty", "presence_penalty")
    given = {each: getattr(request, each) for each in names if getattr(request, each) is not None}
    return SamplingParams(
        stop=list(request.stop),
        logprobs=request.logprobs,
        output_kind=RequestOutputKind.DELTA,
        **given,
    )


def token_of(output: Any, tokenizer: Any) -> Token:
    """Return what an output of vLLM adds: one token, or several."""
    token = Token(output.text, finish_reason=output.finish_reason, count=len(output.token_ids))
    if output.logprobs:
        found = output.logprobs[-1]
        token.logprob = found[output.token_ids[-1]].logprob
        best = sorted(found.items(), key=lambda each: each[1].rank or 0)
        token.top_logprobs = [(each.decoded_token or tokenizer.decode([n]), each.logprob) for n, each in best]
    return token
