"""Serve models in OpenAI's form: ``serve.run(build_app({"name": Engine}))``."""

from __future__ import annotations

from daskserve.openai.app import ModelConfig, build_app
from daskserve.openai.engine import (
    EmbeddingRequest,
    Embeddings,
    Engine,
    GenerationRequest,
    Token,
    ToolCall,
    text_of,
)
from daskserve.openai.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError

__all__ = [
    "ContextLengthError",
    "EmbeddingRequest",
    "Embeddings",
    "Engine",
    "GenerationRequest",
    "InvalidRequestError",
    "ModelConfig",
    "ModelNotFoundError",
    "Token",
    "ToolCall",
    "build_app",
    "text_of",
]
