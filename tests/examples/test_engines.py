"""The engines of the examples for other libraries, with stand-ins for these libraries."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from daskserve.openai import (
    EmbeddingRequest,
    GenerationRequest,
    InvalidRequestError,
    ModelNotFoundError,
    Token,
)

EXAMPLES = Path(__file__).parents[2] / "examples"
USER = [{"role": "user", "content": "one two"}]


def load(monkeypatch: pytest.MonkeyPatch, folder: str, name: str, **modules: dict[str, Any]) -> Any:
    """Import the engine of an example, with stand-ins for modules."""
    for module, names in modules.items():
        made = ModuleType(module.replace("__", "."))
        vars(made).update(names)
        monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.syspath_prepend(EXAMPLES / folder)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)


def answer(engine: Any, **fields: Any) -> list[Token]:
    async def read() -> list[Token]:
        return [each async for each in engine.generate(GenerationRequest(**fields))]

    return asyncio.run(read())


# ---- llama.cpp


class Llama:
    """A stand-in for `llama_cpp.Llama`, made from its documented interface."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.asked: dict[str, Any] = {}
        self.running = 0

    def n_ctx(self) -> int:
        return 8

    def tokenize(self, text: bytes) -> list[int]:
        return list(range(len(text.split())))

    def create_chat_completion(self, messages: Any, **options: Any) -> Iterator[Any]:
        self.asked = options
        yield {"choices": [{"delta": {"role": "assistant"}, "finish_reason": None}]}
        for word in ("a ", "b"):
            self.running += 1
            assert self.running == 1
            top = [{"token": word, "logprob": -0.1}]
            logprobs = {"content": [{"token": word, "logprob": -0.1, "top_logprobs": top}]}
            choice = {"delta": {"content": word}, "finish_reason": None, "logprobs": logprobs}
            self.running -= 1
            yield {"choices": [choice]}
        call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}
        yield {"choices": [{"delta": {"tool_calls": [call]}, "finish_reason": None}]}
        yield {"choices": [{"delta": {}, "finish_reason": "stop"}]}

    def create_completion(self, prompt: Any, **options: Any) -> Iterator[Any]:
        self.asked = options
        logprobs = {"tokens": ["x"], "token_logprobs": [-0.2], "top_logprobs": [{"x": -0.2}]}
        yield {"choices": [{"text": "x", "logprobs": logprobs, "finish_reason": None}]}
        yield {"choices": [{"text": "", "logprobs": None, "finish_reason": "length"}]}

    def create_embedding(self, texts: Any) -> Any:
        return {"data": [{"embedding": [1.0]} for _ in texts], "usage": {"prompt_tokens": 3}}


def test_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load(monkeypatch, "llama_cpp", "llama_cpp_engine", llama_cpp={"Llama": Llama})
    engine = module.LlamaCppEngine(model_path="m.gguf")
    assert (engine.context_length, engine._llama.options["model_path"]) == (8, "m.gguf")
    assert asyncio.run(engine.count_tokens(GenerationRequest(messages=USER))) == 2
    tokens = answer(engine, messages=USER, max_tokens=9, stop=("x",), seed=3, logprobs=1)
    assert "".join(each.text for each in tokens) == "a b"
    assert [each.count for each in tokens] == [0, 1, 1, 1, 0]
    assert (tokens[1].logprob, tokens[1].top_logprobs) == (-0.1, [("a ", -0.1)])
    assert (tokens[3].tool_calls[0].name, tokens[-1].finish_reason) == ("f", "stop")
    asked = engine._llama.asked
    assert (asked["stop"], asked["seed"], asked["top_logprobs"]) == (["x"], 3, 1)
    assert "temperature" not in asked
    plain = answer(engine, prompt=[1, 2], logprobs=1, temperature=0.0)
    assert [(each.text, each.logprob, each.finish_reason) for each in plain] == [
        ("x", -0.2, None),
        ("", None, "length"),
    ]
    embeddings = asyncio.run(engine.embed(EmbeddingRequest(inputs=["a", "b"])))
    assert (embeddings.vectors, embeddings.prompt_tokens) == ([[1.0], [1.0]], 3)


def test_llama_cpp_is_left_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load(monkeypatch, "llama_cpp", "llama_cpp_engine", llama_cpp={"Llama": Llama})
    engine = module.LlamaCppEngine()

    async def leave() -> list[Token]:
        stream = engine.generate(GenerationRequest(messages=USER))
        await anext(stream)
        await stream.aclose()
        return [each async for each in engine.generate(GenerationRequest(prompt="a"))]

    assert len(asyncio.run(leave())) == 2


def write_gguf(gguf: Any, numpy: Any, path: Path) -> None:
    """Write a Llama model of one layer with random weights."""
    rng = numpy.random.default_rng(0)
    words = "one two three four five six seven eight nine ten".split()
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{number:02X}>" for number in range(256))]
    no_words = len(pieces)
    pieces += [f"\u2581{word}" for word in words]
    size, width, inner = len(pieces), 32, 64
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(words)])  # unknown, control, bytes, normal
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", numpy.ones(width, numpy.float32))
    shapes = {"token_embd": (size, width), "output": (size, width), "blk.0.ffn_down": (width, inner)}
    shapes |= {f"blk.0.ffn_{name}": (inner, width) for name in ("gate", "up")}
    shapes |= {f"blk.0.attn_{name}": (width, width) for name in ("q", "k", "v", "output")}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape).astype(numpy.float32)
        if name == "output":
            values[:no_words] = 0  # parts of characters are no text on their own
        writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.nightly
@pytest.mark.filterwarnings("default")
def test_llama_cpp_with_a_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    gguf: Any = pytest.importorskip("gguf")
    path = tmp_path / "tiny.gguf"
    write_gguf(gguf, pytest.importorskip("numpy"), path)
    module = load(monkeypatch, "llama_cpp", "llama_cpp_engine")
    engine = module.LlamaCppEngine(
        model_path=str(path), n_ctx=256, n_threads=1, logits_all=True, chat_format="chatml"
    )
    assert engine.context_length == 256
    assert asyncio.run(engine.count_tokens(GenerationRequest(prompt=" one two"))) >= 2
    options: dict[str, Any] = {"max_tokens": 9, "temperature": 0.0, "seed": 1}
    # The library's answer without streaming.
    plain = engine._llama.create_completion(" one two", **options)["choices"][0]
    chat = engine._llama.create_chat_completion(USER, **options)["choices"][0]
    for fields, text, reason in (
        ({"prompt": " one two"}, plain["text"], plain["finish_reason"]),
        ({"messages": USER}, chat["message"]["content"], chat["finish_reason"]),
    ):
        tokens = answer(engine, **fields, **options)
        assert ("".join(each.text for each in tokens), tokens[-1].finish_reason) == (text, reason)
    found = answer(engine, prompt=" one two", logprobs=2, **options)
    assert all(each.logprob is not None and each.logprob < 0 for each in found if each.text)

    async def leave() -> list[Token]:
        stream = engine.generate(GenerationRequest(messages=USER, **options))
        await anext(stream)
        await stream.aclose()
        return [each async for each in engine.generate(GenerationRequest(messages=USER, **options))]

    assert "".join(each.text for each in asyncio.run(leave())) == chat["message"]["content"]
    embedding = module.LlamaCppEngine(model_path=str(path), n_ctx=64, n_threads=1, embedding=True)
    made = asyncio.run(embedding.embed(EmbeddingRequest(inputs=["one", "two"])))
    assert len(made.vectors) == 2
    assert made.prompt_tokens > 2


# ---- vLLM


class AsyncLLM:
    """A stand-in for vLLM's engine, made from its documented interface."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    @classmethod
    def from_engine_args(cls, args: Any) -> AsyncLLM:
        asyncio.get_running_loop()
        return cls()

    async def get_tokenizer(self) -> Any:
        return self

    def apply_chat_template(self, messages: Any, **options: Any) -> list[int]:
        return [len(each["content"].split()) for each in messages]

    def decode(self, numbers: list[int]) -> str:
        return f"<{numbers[0]}>"

    async def check_health(self) -> None: ...

    async def generate(
        self, prompt: Any, sampling: Any, request_id: str, **options: Any
    ) -> AsyncIterator[Any]:
        self.asked = [prompt, sampling, request_id, options["lora_request"]]
        logprobs = [
            {
                5: SimpleNamespace(logprob=-0.1, rank=1, decoded_token="hi"),
                6: SimpleNamespace(logprob=-2.0, rank=2, decoded_token=None),
            }
        ]
        for text, reason in (("hi", None), (" you", "length")):
            output = SimpleNamespace(text=text, token_ids=[5], finish_reason=reason, logprobs=logprobs)
            yield SimpleNamespace(outputs=[output], prompt_token_ids=[1, 2, 3])


def test_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load(
        monkeypatch,
        "vllm",
        "vllm_engine",
        vllm={"SamplingParams": SimpleNamespace},
        vllm__engine={},
        vllm__engine__arg_utils={"AsyncEngineArgs": SimpleNamespace},
        vllm__lora={},
        vllm__lora__request={"LoRARequest": lambda *args: args},
        vllm__sampling_params={"RequestOutputKind": SimpleNamespace(DELTA="delta")},
        vllm__v1={},
        vllm__v1__engine={},
        vllm__v1__engine__async_llm={"AsyncLLM": AsyncLLM},
    )
    engine = module.VLLMEngine(model="m", loras={"law": "/loras/law"})
    tokens = answer(engine, messages=USER, adapter="law", max_tokens=2, logprobs=1, request_id="r")
    assert [(each.text, each.prompt_tokens, each.finish_reason) for each in tokens] == [
        ("hi", 3, None),
        (" you", None, "length"),
    ]
    assert (tokens[0].logprob, tokens[0].top_logprobs) == (-0.1, [("hi", -0.1), ("<6>", -2.0)])
    prompt, sampling, request_id, lora = engine._made.asked
    assert (prompt, request_id, lora) == ({"prompt_token_ids": [2]}, "r-0-1", ("law", 1, "/loras/law"))
    assert (sampling.max_tokens, sampling.output_kind, sampling.stop) == (2, "delta", [])
    assert not hasattr(sampling, "temperature")
    with pytest.raises(ModelNotFoundError):
        answer(engine, messages=USER, adapter="art")


# ---- transformers


def test_transformers_refuses_prompts_that_would_fail_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(max_position_embeddings=8, vocab_size=10)
    model = SimpleNamespace(config=config)
    model.to = lambda _: model
    model.eval = lambda: model
    tokenizer = SimpleNamespace(encode=lambda text: [len(each) for each in text.split()])
    torch = {"inference_mode": lambda: lambda step: step}
    transformers = {
        "AutoModelForCausalLM": SimpleNamespace(from_pretrained=lambda _: model),
        "AutoTokenizer": SimpleNamespace(from_pretrained=lambda _: tokenizer),
    }
    module = load(monkeypatch, "transformers", "transformers_engine", torch=torch, transformers=transformers)
    engine = module.TransformersEngine("m")
    assert engine.count_tokens(GenerationRequest(prompt=[0, 9])) == 2
    assert engine.count_tokens(GenerationRequest(prompt="one two")) == 2
    for wrong in ("", [], [10], [-1]):
        with pytest.raises(InvalidRequestError, match="from 0 to 9"):
            engine.count_tokens(GenerationRequest(prompt=wrong))


@pytest.mark.nightly
@pytest.mark.filterwarnings("default")
def test_transformers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch: Any = pytest.importorskip("torch")
    transformers: Any = pytest.importorskip("transformers")
    tokenizers: Any = pytest.importorskip("tokenizers")

    words = ["<end>", "<unk>", *"user assistant : one two three four".split()]
    vocabulary = {word: number for number, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<end>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(tmp_path)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=len(words), n_positions=64, n_embd=16, n_layer=2, n_head=2, eos_token_id=0, bos_token_id=0
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)

    module = load(monkeypatch, "transformers", "transformers_engine")
    engine = module.TransformersEngine(str(tmp_path), threads=1)
    assert engine.context_length == 64

    async def ask(**fields: Any) -> list[Token]:
        request = GenerationRequest(messages=USER, **fields)
        engine.count_tokens(request)
        return [each async for each in engine.generate(request)]

    async def together() -> list[list[Token]]:
        return await asyncio.gather(*(ask(max_tokens=count, temperature=0.0, logprobs=2) for count in (3, 7)))

    short, long = asyncio.run(together())
    assert [each.text for each in short] == [each.text for each in long[: len(short)]]
    # The cache of a request does not change the result: the whole text gives the same tokens.
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = tokenizer.encode("user: one two\nassistant:")
    with torch.inference_mode():
        for token in long:
            logits = model(torch.tensor([ids])).logits[0, -1]
            assert token.data == int(logits.argmax())
            assert token.logprob == pytest.approx(float(logits.log_softmax(-1).max()), abs=1e-4)
            ids.append(token.data)
    assert long[-1].finish_reason in ("stop", "length")
    again = [[each.data for each in asyncio.run(ask(max_tokens=9, seed=5))] for _ in range(2)]
    assert again[0] == again[1]
