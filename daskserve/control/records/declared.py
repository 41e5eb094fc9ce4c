"""Declared configurations: one record per application, and one about their last change.

See `daskserve.control.records.records`, and `daskserve.control.declared.apply`, which writes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The origin of a declaration: the program, the file's name, and its version, such as a Git commit."""

    by: str = ""
    source: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class ConfigRecord(Origin):
    """The declared configuration of one application.

    The controller builds and deploys the application until ``settled`` equals ``generation``.

    Attributes
    ----------
    config : dict
        The plain values of a `daskserve.config_file.model.ApplicationConfig`, with references to variables
        and secrets as they are in the file.
    generation : int
        The number of the last declaration that contained it.
    settled : int
        The last generation that was deployed or has failed.
    error : str
        The reason why that generation failed, with the traceback of user code.
    goal : str
        The goal of its deploy; empty if the deploy changed nothing.
    declared_at : float
        In seconds since the epoch.
    """

    KIND: ClassVar[str] = "config"

    name: str
    config: Mapping[str, Any] = field(repr=False)
    generation: int
    settled: int = 0
    error: str = ""
    goal: str = ""
    declared_at: float = 0.0

    @property
    def key(self) -> str:
        return f"{self.KIND}/{self.name}"

    @property
    def is_settled(self) -> bool:
        """Whether this generation was deployed or has failed, so that there is nothing to build."""
        return self.settled == self.generation


@dataclass(frozen=True, slots=True)
class DeclarationRecord(Origin):
    """The last change of the declared configuration; see `ConfigRecord`.

    Attributes
    ----------
    number : int
        Grows with each change: the version that clients compare.
    request_id : str
        Id of the client's call, which distinguishes its retry from a second call.
    instance : dict
        The plain values of a `daskserve.config_file.model.InstanceConfig`, without the applications.
    """

    KIND: ClassVar[str] = "declaration"

    number: int = 0
    request_id: str = ""
    instance: Mapping[str, Any] = field(default_factory=dict, repr=False)
    declared_at: float = 0.0

    @property
    def key(self) -> str:
        return f"{self.KIND}/last"


class Declared:
    """The records of an instance's declared configuration. Only `State.apply` changes it."""

    def __init__(self) -> None:
        self.configs: dict[str, ConfigRecord] = {}
        self.last = DeclarationRecord()

    def __iter__(self) -> Iterator[ConfigRecord | DeclarationRecord]:
        yield from self.configs.values()
        if self.last.number:
            yield self.last
