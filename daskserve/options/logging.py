"""How an instance, an application or a deployment logs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer

from daskserve.common import settings
from daskserve.options.fields.base import ByteCount, Options, parse_options

#: Only the levels of Python itself, because workers do not know levels that a program adds.
_LEVELS: Mapping[str, int] = {
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "WARN": logging.WARNING,
    "ERROR": logging.ERROR,
    "CRITICAL": logging.CRITICAL,
    "FATAL": logging.CRITICAL,
    "NOTSET": logging.NOTSET,
}


class LoggingConfig(Options):
    """How an instance, an application or a deployment logs.

    Fields that a deployment does not set are inherited from its application, then from the instance.
    """

    place: ClassVar[str] = "logging_config"

    encoding: Literal["TEXT", "JSON"] = Field(
        "TEXT", description="``TEXT``, or ``JSON``: one object per line."
    )
    log_level: str = Field(
        "INFO",
        description="Minimum level of records of the loggers ``daskserve`` and ``ray.serve``, as a name "
        "or a number. Other loggers keep their own levels.",
    )
    logs_dir: str | None = Field(
        None,
        description="Folder of the log files on the hosts of the workers: one file for each replica, and "
        "one for each process that runs proxies or the controller. None: no files.",
    )
    enable_access_log: bool = Field(
        True, description="Whether each request is logged in one line when it ends."
    )
    additional_log_standard_attrs: list[str] = Field(
        default_factory=list,
        description="Additional attributes of Python's ``LogRecord`` to log, such as ``funcName``.",
    )
    output: Literal["stdout", "files", "both"] | None = Field(
        None,
        description="Where records go. None: to files if ``logs_dir`` is set, otherwise to standard "
        "output. Records that a handler of your own receives do not go to standard output.",
    )
    max_file_bytes: ByteCount = Field(
        64 << 20, ge=4096, description="Size at which a log file is rotated, in bytes."
    )
    max_files: int = Field(
        5, ge=0, le=1000, description="Number of rotated files that are kept for each log file."
    )
    ended_files_days: float | None = Field(
        30.0,
        gt=0,
        allow_inf_nan=False,
        description="Days after which the files of ended replicas and processes are deleted, when "
        "another file is opened. None: all are kept.",
    )

    @field_validator("encoding", mode="before")
    @classmethod
    def _in_capitals(cls, value: Any) -> Any:
        return value.upper() if isinstance(value, str) else value

    @field_validator("log_level", mode="before")
    @classmethod
    def _is_a_level(cls, value: Any) -> Any:
        given = value
        if isinstance(value, int) and not isinstance(value, bool):
            value = next((name for name, number in _LEVELS.items() if number == value), "")
        if not isinstance(value, str) or value.upper() not in _LEVELS:
            raise ValueError(f"{given!r} is not a level of logging; give one of {', '.join(_LEVELS)}")
        return value.upper()

    @field_validator("additional_log_standard_attrs")
    @classmethod
    def _exist(cls, names: list[str]) -> list[str]:
        known = {*vars(logging.makeLogRecord({})), "message", "asctime"}
        unknown = [each for each in names if each not in known]
        if unknown:
            raise ValueError(
                f"{unknown[0]!r} is not an attribute of LogRecord; it has {', '.join(sorted(known))}"
            )
        return list(dict.fromkeys(names))

    @model_serializer(mode="wrap")
    def _only_what_is_set(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if name in self.model_fields_set}

    def over(self, outer: LoggingConfig | None) -> LoggingConfig:
        """Return this config, with fields that it does not set taken from ``outer``."""
        return self if outer is None else LoggingConfig(**{**outer.model_dump(), **self.model_dump()})


def over(inner: LoggingConfig | None, outer: LoggingConfig | None) -> LoggingConfig | None:
    """Return ``inner.over(outer)``; either may be missing."""
    return outer if inner is None else inner.over(outer)


def instance_logging(given: LoggingConfig | Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return how an instance logs: the fields that are set here or in Dask's configuration."""
    defaults = settings.logging_defaults()
    if given is None and defaults is None:
        return None
    outer = parse_options(LoggingConfig, defaults, what="daskserve.logging")
    return parse_options(LoggingConfig, given, what="logging_config").over(outer).model_dump(mode="json")
