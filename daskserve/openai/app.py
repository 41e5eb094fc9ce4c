"""``build_app``: the application that serves models in OpenAI's form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from daskserve.client.definitions.deployments import Application
from daskserve.client.functions.deployment import deployment
from daskserve.errors import BadRequestError
from daskserve.openai.model import ModelServer
from daskserve.openai.server import ModelFacts, OpenAIServer

#: Maximum number of concurrent requests that a replica of a model accepts; its engine may queue them.
MAX_ONGOING = 256
#: The same for the server, which only passes tokens on.
MAX_ONGOING_OF_SERVER = 1000


class ModelConfig(BaseModel):
    """A model to serve."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: Any = Field(description="The class of its engine, a function that makes one, or an import path.")
    args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments for the engine.")
    adapters: tuple[str, ...] = Field(
        (),
        description="Variants that the engine has, such as LoRA adapters, which clients name "
        '``model:adapter``. ``"*"`` lets the engine decide.',
    )
    token_timeout_s: float | None = Field(
        60.0, gt=0, description="How long to wait for each token, and for embeddings. None: for ever."
    )
    deployment: dict[str, Any] = Field(
        default_factory=dict, description="Options of its deployment, such as ``num_replicas``."
    )
    owned_by: str = Field("daskserve", description="The owner, as the list of models shows it.")


def build_app(models: Mapping[str, Any], *, server: Mapping[str, Any] | None = None) -> Application:
    """Return an application that serves models in OpenAI's form.

    It has one deployment for each model, and the deployment ``OpenAIServer``, which answers requests to
    ``/v1/models``, ``/v1/chat/completions``, ``/v1/completions``, ``/v1/responses`` and ``/v1/embeddings``.

    Parameters
    ----------
    models : dict
        The models by the names that clients use. Each is a `ModelConfig`, or a dict of its fields, or only
        the engine: a class, a function that makes one, or an import path.
    server : dict, optional
        Options of the deployment ``OpenAIServer``, such as ``num_replicas`` or ``priority_config``.

    Raises
    ------
    BadRequestError
        There is no model, or a name is empty.
    pydantic.ValidationError
        A `ValueError`: a config has a wrong field.

    Examples
    --------
    >>> class Echo:
    ...     async def generate(self, request):
    ...         for word in text_of(request.messages[-1]).split():
    ...             yield f"{word} "
    >>> serve.run(build_app({"echo": Echo}))  # doctest: +SKIP
    """
    if not isinstance(models, Mapping) or not models:
        raise BadRequestError(f"build_app takes the models by name, at least one; got {models!r:.200}")
    applications: dict[str, Application] = {}
    facts: dict[str, ModelFacts] = {}
    names: set[str] = set()
    for name, given in models.items():
        config = _config_of(name, given)
        options = {"max_ongoing_requests": MAX_ONGOING, **config.deployment}
        options.setdefault("name", _deployment_name(name, names))
        names.add(options["name"])
        made = deployment(**options)(ModelServer)
        applications[name] = made.bind(config.engine, config.args, config.token_timeout_s)
        facts[name] = ModelFacts(config.adapters, config.owned_by)
    # Requests are cancelled when their client leaves, so that the model stops even for a whole answer.
    own = {"max_ongoing_requests": MAX_ONGOING_OF_SERVER, "on_disconnect": "cancel", **(server or {})}
    return deployment(**own)(OpenAIServer).bind(applications, facts)


def _config_of(name: Any, given: Any) -> ModelConfig:
    if not isinstance(name, str) or not name.strip():
        raise BadRequestError(f"The name of a model must be a string, got {name!r}")
    if isinstance(given, ModelConfig):
        return given
    return ModelConfig(**given) if isinstance(given, Mapping) else ModelConfig(engine=given)


def _deployment_name(model: str, taken: set[str]) -> str:
    """Return a name for the deployment of a model: the model's name, with invalid characters replaced."""
    base = name = re.sub(r"[^A-Za-z0-9_.-]+", "-", model).strip("-.") or "model"
    number = 2
    while name in taken or name == OpenAIServer.__name__:
        name, number = f"{base}-{number}", number + 1
    return name
