"""The values of `daskserve.options.logging.LoggingConfig` in a process, read without pydantic."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

#: The loggers to which ``log_level`` applies: daskserve's own, and the logger that Ray Serve's users use.
LOGGERS = ("daskserve", "ray.serve")


def has_handlers(source: logging.Logger) -> bool:
    """Return whether a logger has handlers; for daskserve's loggers, the root's handlers do not count.

    ``logging.warning("...")`` adds a handler to the root logger, often without the author's knowledge.
    """
    if not source.name.startswith(LOGGERS):
        return source.hasHandlers()
    each: logging.Logger | None = source
    while each is not None and each.parent is not None:
        if each.handlers:
            return True
        each = each.parent if each.propagate else None
    return False


@dataclass(frozen=True, slots=True)
class LogSettings:
    """The fields of `daskserve.options.logging.LoggingConfig`, with its defaults."""

    encoding: str = "TEXT"
    log_level: str = "INFO"
    logs_dir: str | None = None
    enable_access_log: bool = True
    additional_log_standard_attrs: tuple[str, ...] = ()
    output: str | None = None
    max_file_bytes: int = 64 << 20
    max_files: int = 5
    ended_files_days: float | None = 30.0
    level: int = field(init=False)

    def __post_init__(self) -> None:
        # A logger with the level ``NOTSET`` has the level of the root logger.
        object.__setattr__(self, "level", logging.getLevelNamesMapping()[self.log_level] or 1)

    @property
    def to_stdout(self) -> bool:
        """Whether records go to standard output."""
        return self.output in ("stdout", "both") or (self.output is None and self.logs_dir is None)

    @property
    def folder(self) -> str | None:
        """The folder of the files; None if no files are written."""
        return None if self.output == "stdout" else self.logs_dir


_NAMES = frozenset(each.name for each in fields(LogSettings) if each.init)


def merged(*layers: Mapping[str, Any] | None) -> LogSettings | None:
    """Return settings from layers of fields, where later layers override earlier ones; None for no layers."""
    given = [each for each in layers if each is not None]
    if not given:
        return None
    found: dict[str, Any] = {}
    for each in given:
        found |= {name: value for name, value in each.items() if name in _NAMES}
    if "additional_log_standard_attrs" in found:
        found["additional_log_standard_attrs"] = tuple(found["additional_log_standard_attrs"])
    return LogSettings(**found)
