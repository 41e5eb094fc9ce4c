"""The spec of a backend: what a client asks for, as it travels to the controller.

The options are the models that the client formed. On the wire, and in the store, a model is the options that
were set: a reader with newer models fills in its own defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from daskserve.common.types import BackendTag
from daskserve.options.actor import ActorOptions
from daskserve.options.backend import BackendConfig


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """A backend as a client asks for it; user code is bytes.

    Attributes
    ----------
    config : BackendConfig
        Without ``user_config``, and with a policy that is code of the user's pickled.
    user_config : bytes or None
        ``dump_bytes`` of what ``reconfigure`` gets.
    version : str or None
        Names the code; None: the controller derives it from the code.
    user_version, prev_version : str or None
        The version that the user named, and the one that must be there already.
    env : str or None
        The environment, as `daskserve.options.environment.Environment.to_text` returns it.
    parts : tuple
        The content of the parcel that stands for the code, if it is large; stays with the client.
    request_id : str
        Tells the retry of a call from a second call.
    timeout_s, progress_timeout_s : float or None
        As in `daskserve.control.records.records.GoalRecord`.
    """

    tag: BackendTag
    code: bytes = field(repr=False)
    config: BackendConfig
    user_config: bytes | None = field(repr=False)
    actor_options: ActorOptions
    version: str | None
    user_version: str | None
    prev_version: str | None
    env: str | None = field(repr=False)
    request_id: str
    timeout_s: float | None
    progress_timeout_s: float | None
    parts: tuple[Any, ...]

    def to_plain(self) -> dict[str, Any]:
        """Return the spec as plain values, without the parts of a parcel."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "parts"}
        return values | {"config": self.config.to_plain(), "actor_options": self.actor_options.to_plain()}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Self:
        """Return the spec that `to_plain` gave.

        Its models are formed, and so validated, once more: that is how pydantic restores nested models.
        """
        models = {
            "config": BackendConfig(**values["config"]),
            "actor_options": ActorOptions(**values["actor_options"]),
        }
        return cls(**{**values, **models, "parts": ()})
