"""The bodies of requests. Unknown fields are passed on to the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError, from_json

from daskserve.openai.engine import EmbeddingRequest, GenerationRequest
from daskserve.openai.errors import InvalidRequestError, invalid_request

BodyT = TypeVar("BodyT", bound="Body")
SamplingT = TypeVar("SamplingT", bound="Sampling")
ItemT = TypeVar("ItemT")

#: Maximum number of answers to one request; the limit of OpenAI.
MAX_CHOICES = 128
#: Maximum number of texts of one request for embeddings; the limit of OpenAI.
MAX_INPUTS = 2048
#: Maximum number of bytes that a request for several answers sends to the models: each answer gets a copy.
MAX_SENT_SIZE = 16 * 2**20
#: Maximum length of vectors that a client may request.
MAX_DIMENSIONS = 65_536
#: Maximum number of messages of a conversation, or of items of the input of a response.
MAX_MESSAGES = 10_000
#: Maximum number of fields of objects whose values are validated; OpenAI's limits are lower.
MAX_FIELDS = 2048
#: Maximum number of tools; OpenAI has 128.
MAX_TOOLS = 1024
MAX_STOPS = 64
MAX_STOP_LENGTH = 1000


def few_fields(found: Any) -> Any:
    """Reject an object with too many fields before each of its values is checked."""
    if isinstance(found, dict) and len(found) > MAX_FIELDS:
        raise PydanticCustomError(
            "too_long", "Object should have at most {limit} fields", {"limit": MAX_FIELDS}
        )
    return found


# Without fail_fast, a body with many wrong items would produce one error for each, which takes seconds and
# gigabytes.
Items: TypeAlias = Annotated[list[ItemT], Field(fail_fast=True)]
Fields: TypeAlias = Annotated[dict[str, ItemT], BeforeValidator(few_fields)]
#: Engines count in 32 bits, as NumPy and llama.cpp do.
MAX_INT32 = 2**31 - 1
Count: TypeAlias = Annotated[int, Field(ge=1, le=MAX_INT32)]
TokenId: TypeAlias = Annotated[int, Field(ge=0, le=MAX_INT32)]
StopText: TypeAlias = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
StopTexts: TypeAlias = Annotated[list[StopText], Field(fail_fast=True, max_length=MAX_STOPS)]
Penalty: TypeAlias = Annotated[float, Field(ge=-2, le=2)]
Tools: TypeAlias = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_TOOLS)]
Bias: TypeAlias = Annotated[float, Field(ge=-100, le=100)]
Tokens: TypeAlias = Items[TokenId]
Texts: TypeAlias = Annotated[list[str], Field(fail_fast=True, max_length=MAX_INPUTS)]
TokenLists: TypeAlias = Annotated[list[Tokens], Field(fail_fast=True, max_length=MAX_INPUTS)]


class Body(BaseModel):
    """The fields that all requests have."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    model: str = Field(min_length=1, max_length=1000)
    user: str | None = None

    @classmethod
    def parse(cls: type[BodyT], body: bytes) -> BodyT:
        """Return the request of a body; raise `InvalidRequestError` if it is wrong."""
        try:
            parsed = cls.model_validate_json(body)
            if b"NaN" in body or b"Infinity" in body:
                # Unknown fields may have any value, but a response that repeats NaN would not be JSON.
                from_json(body, allow_inf_nan=False)
            return parsed
        except ValidationError as error:
            raise invalid_request(error) from None
        except ValueError as error:
            raise InvalidRequestError(f"The body is no valid JSON: {error}.") from None

    @property
    def extra(self) -> dict[str, Any]:
        """The fields that the server does not know."""
        return dict(self.model_extra or {})


class StreamOptions(BaseModel):
    """The options of a stream."""

    include_usage: bool | None = None


class Message(BaseModel):
    """A message of a conversation; the engine gets all of its fields."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Items[dict[str, Any]] | None = None


class Sampling(Body):
    """The fields that chat and plain completions have in common."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    # The same range as OpenAI's, because the generators of models do not accept other values.
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StopText | StopTexts | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Fields[Bias] | None = None

    @classmethod
    def parse(cls: type[SamplingT], body: bytes) -> SamplingT:
        parsed = super().parse(body)
        size = parsed.sent_size(len(body))
        if size > MAX_SENT_SIZE:
            text = (
                f"The copies of the request for all answers have {size} bytes; the limit is {MAX_SENT_SIZE}."
            )
            param = "n" if (parsed.n or 1) > 1 else "prompt"
            raise InvalidRequestError(text, param=param, code="invalid_value")
        return parsed

    def sent_size(self, size: int) -> int:
        """Return roughly how many bytes are sent to the models for a body; 0 if it is sent only once."""
        count = self.n or 1
        return size * count if count > 1 else 0

    @property
    def has_usage(self) -> bool:
        """Whether the stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self) -> dict[str, Any]:
        """Return the fields that the engine gets unchanged."""
        names = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "logit_bias", "user")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return {**{each: getattr(self, each) for each in names}, "stop": stop, "extra": self.extra}

    def choices(self, base: GenerationRequest, count: int) -> Iterator[GenerationRequest]:
        """Yield the requests for several answers to one prompt, each with a different seed."""
        for choice in range(count):
            seed = None if self.seed is None else (self.seed + choice + 2**63) % 2**64 - 2**63
            yield replace(base, choice=choice, seed=seed)


class ChatBody(Sampling):
    """``POST /v1/chat/completions``."""

    messages: Items[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None

    def generations(self) -> list[GenerationRequest]:
        """Return the requests to the engine, one for each choice."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
        base = GenerationRequest(
            messages=[each.model_dump(exclude_unset=True) for each in self.messages],
            max_tokens=self.max_completion_tokens or self.max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            tools=self.tools,
            tool_choice=self.tool_choice,
            response_format=self.response_format,
            **self.sampling(),
        )
        return list(self.choices(base, self.n or 1))


def _texts_in(given: str | Sequence[Any]) -> list[Any]:
    """Return the texts in a field: a list of numbers is one tokenized text, any other list has several."""
    is_one = isinstance(given, str) or bool(given and isinstance(given[0], int))
    return [given] if is_one else list(given)


class CompletionBody(Sampling):
    """``POST /v1/completions``."""

    prompt: str | Tokens | Texts | TokenLists
    # Plain completions may request 0 tokens, to get only the prompt echoed.
    max_tokens: Annotated[int, Field(ge=0, le=MAX_INT32)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = Field(None, ge=0, le=20)

    def sent_size(self, size: int) -> int:
        count = len(self.prompts())
        # Each prompt is sent with all other fields.
        others = len(self.model_dump_json(exclude={"prompt"})) * count * (self.n or 1) if count > 1 else 0
        return super().sent_size(size) + others

    def prompts(self) -> list[Any]:
        """Return the prompts."""
        return _texts_in(self.prompt)

    def generations(self) -> list[GenerationRequest]:
        """Return the requests to the engine: for each prompt, one for each choice."""
        prompts, count = self.prompts(), self.n or 1
        if self.best_of not in (None, count):
            raise InvalidRequestError("'best_of' must be equal to 'n', or left out.", param="best_of")
        if not prompts:
            raise InvalidRequestError("'prompt' must not be empty.", param="prompt")
        if len(prompts) * count > MAX_CHOICES:
            text = f"'prompt' and 'n' ask for {len(prompts) * count} answers; the limit is {MAX_CHOICES}."
            raise InvalidRequestError(text, param="n" if count > 1 else "prompt")
        if self.echo and not all(isinstance(each, str) for each in prompts):
            raise InvalidRequestError("'echo' needs a 'prompt' of text.", param="echo")
        sampling = self.sampling()
        if self.suffix is not None:
            sampling["extra"]["suffix"] = self.suffix
        found: list[GenerationRequest] = []
        for prompt in prompts:
            limit = 16 if self.max_tokens is None else self.max_tokens  # OpenAI's default
            base = GenerationRequest(prompt=prompt, max_tokens=limit, logprobs=self.logprobs, **sampling)
            found += self.choices(base, count)
        return found


class EmbeddingBody(Body):
    """``POST /v1/embeddings``."""

    input: str | Tokens | Texts | TokenLists
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=MAX_DIMENSIONS)] | None = None

    def request(self) -> EmbeddingRequest:
        """Return the request to the engine."""
        inputs = _texts_in(self.input)
        if not 1 <= len(inputs) <= MAX_INPUTS or not all(inputs):
            raise InvalidRequestError(
                f"'input' must be 1 to {MAX_INPUTS} texts, none of them empty.", param="input"
            )
        return EmbeddingRequest(inputs=inputs, dimensions=self.dimensions, user=self.user, extra=self.extra)
