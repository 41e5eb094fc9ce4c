"""Which bodies of requests and answers a deployment writes to a sink."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from daskserve.common.types import split_import_path
from daskserve.options.fields.base import ByteCount, Folder, Masked, Options
from daskserve.options.fields.code import Code
from daskserve.options.fields.pickled import PICKLED
from daskserve.options.fields.secrets import masked


class PayloadLoggingConfig(Options):
    """Which bodies of requests and answers a deployment writes to a sink, as lines of JSON."""

    place: ClassVar[str] = "payload_logging"

    sink: Annotated[Folder, Masked(masked)] = Field(
        description="Folder of the files: a path on the workers, or a URL that fsspec opens, such as "
        "``s3://bucket/payloads``. Credentials are those of fsspec's configuration on the workers.",
        min_length=1,
    )
    sampling_ratio: float = Field(1.0, ge=0, le=1, description="Share of the requests that are logged.")
    mode: Literal["all", "request", "response"] = Field(
        "all", description="What is written of a request: ``request``, ``response``, or ``all``."
    )
    max_bytes: ByteCount = Field(
        64 << 10,
        ge=1,
        le=16 << 20,
        description="Maximum number of bytes that are written of a body; for larger bodies, streams and "
        "WebSockets, the beginning.",
    )
    redact: Code = Field(
        None,
        description='Function, or its import path ``"module:function"``, that receives each event before '
        "it is written and returns the event to write, or None to write nothing. If it raises, nothing is "
        "written.",
    )
    flush_period_s: float = Field(
        10, ge=0.1, le=3600, description="Time for which events are collected into one file, in seconds."
    )

    @field_validator("redact")
    @classmethod
    def _is_a_function(cls, value: Any) -> Any:
        is_path = isinstance(value, str) and (value.startswith(PICKLED) or all(split_import_path(value)))
        if value is None or callable(value) or is_path:
            return value
        raise ValueError(f'redact is {value!r}; give a function, or its import path "module:function"')
