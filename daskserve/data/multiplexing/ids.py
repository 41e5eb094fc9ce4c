"""The ids of models, and the short names under which replicas and routers exchange them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from daskserve.errors import BadRequestError, WrongTypeError

#: Longer ids are shortened where they are published, kept or shown.
MAX_SHOWN = 80
_KEPT = 47


def check_model_id(model_id: Any) -> str:
    """Return a valid model id; raise `WrongTypeError` or `BadRequestError` for any other value."""
    if type(model_id) is not str:
        raise WrongTypeError(f"The model ID must be a string; got {model_id!r}.")
    if not model_id:
        raise BadRequestError(
            "The model ID cannot be empty; the caller names it in the header serve_multiplexed_model_id, or "
            "with handle.options(multiplexed_model_id=...)."
        )
    return model_id


def short_id(model_id: str) -> str:
    """Return a model id, or its beginning and a digest if it is long. The result depends only on the id."""
    if len(model_id) <= MAX_SHOWN:
        return model_id
    digest = hashlib.blake2b(model_id.encode("utf-8", "surrogatepass"), digest_size=16)
    return f"{model_id[:_KEPT]}~{digest.hexdigest()}"


def model_named_in(head: Mapping[str, Any]) -> str:
    """Return the model id in the head of a request's envelope; empty if there is none."""
    facts = head.get("facts")
    if facts is not None:
        return str(facts.get("multiplexed_model_id", ""))
    extensions = head.get("extensions") or {}
    return str(extensions.get("daskserve", {}).get("model_id", ""))
