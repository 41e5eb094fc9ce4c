"""The HTTP options of an instance."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from daskserve.common.types import EVERY_ADDRESS, Location
from daskserve.options.fields.base import ByteCount, Masked, Options, Secret
from daskserve.options.fields.secrets import hidden


class HTTPOptions(Options):
    """HTTP options of an instance."""

    place: ClassVar[str] = "http_options"

    host: str | None = Field(
        "127.0.0.1", description="Address on which the proxies listen. None: no proxies, as with NoServer."
    )
    port: int = Field(8000, ge=0, le=65535, description="Port of the proxies; 0 means a free port.")
    middlewares: list[Any] = Field(
        default_factory=list,
        description="Starlette ``Middleware`` objects wrapped around the ingress, first one outermost.",
    )
    proxy_callback: str | None = Field(
        None,
        description="Import path of a function that each proxy calls when it starts. It returns a list of "
        "Starlette ``Middleware`` objects, which are wrapped around those of ``middlewares``.",
    )
    server: Literal["tornado", "asyncio", "uvicorn"] = Field(
        "tornado",
        description="Transport that reads the sockets: ``tornado``, or ``asyncio`` for the transports of "
        "the event loop, which take less CPU time with uvloop. ``uvicorn`` is the old name of ``asyncio``.",
    )
    location: Location | None = Field(
        Location.HEAD_ONLY,
        description="Workers that get a proxy. None: no proxies, as with NoServer, or Disabled.",
    )
    return_grace_s: float = Field(
        10.0,
        ge=0,
        description="With HeadOnly: how long the proxy waits for a worker on its own host before it "
        "moves to another host, in seconds. Once its own host has had a worker for the same time, it moves "
        "back.",
    )
    system_workers: list[str] = Field(
        default_factory=list,
        description="Workers that are reserved for the controller and the proxies, and never run "
        "replicas: names, addresses or hosts of workers, or resources that workers declare. While the "
        "cluster has none of them, the controller and the proxies run on other workers, and the status "
        "reports this. Empty: the controller and the proxies run on the same workers as replicas.",
    )
    replicas_listen: bool | None = Field(
        None,
        description='Whether replicas with ``isolation="process"`` answer the HTTP requests to their own '
        "deployment themselves, on connections that the proxy of their worker passes to them. None: yes, "
        "unless the proxies serve HTTPS or have middlewares.",
    )
    root_path: str = Field("", description="Path prefix under which a reverse proxy publishes daskserve.")
    request_timeout_s: float | None = Field(
        None,
        gt=0,
        description="Time in seconds after which a request gets 408. None: no limit. Clients can shorten "
        "it with the header ``X-Request-Timeout-Seconds``, but not extend it; the value 0 does not remove "
        "it.",
    )
    max_body_bytes: ByteCount = Field(
        64 << 20,
        ge=0,
        description="Maximum size of a request body, in bytes; a larger one gets 413. A backend can "
        "override it.",
    )
    max_buffered_bytes: ByteCount | None = Field(
        None,
        gt=0,
        description="Maximum size of all request bodies and WebSocket messages that a proxy holds at a "
        "time, in bytes. Beyond it, a request gets 503 with ``Retry-After``, and a WebSocket is closed "
        "with code 1013. None: eight times ``max_body_bytes``, but at least 64 MiB.",
    )
    min_body_bytes_per_s: ByteCount = Field(
        240,
        ge=0,
        description="Minimum rate of a request body, in bytes per second. A slower one gets 408, and the "
        "connection is closed. Two things do not count: time during which the backend does not read, and "
        "data that arrives after the start of the response. 0: no minimum.",
    )
    body_grace_s: float = Field(
        20.0,
        gt=0,
        description="How far a request body may fall behind its minimum rate before it gets 408, in seconds.",
    )
    write_stall_timeout_s: float = Field(
        60.0,
        gt=0,
        description="Time in seconds without progress after which a response is aborted, and its user "
        "code cancelled, because the client accepts no data.",
    )
    busy_write_stall_timeout_s: float = Field(
        5.0,
        gt=0,
        description="The same timeout while other requests of the endpoint wait for a slot, in seconds.",
    )
    max_unsent_bytes: ByteCount = Field(
        1 << 20,
        ge=0,
        description="Number of bytes of a streamed response that may wait for a slow client before user "
        "code is paused. Complete responses wait in the proxy and hold no slot, as long as their total is "
        "within ``max_buffered_bytes``.",
    )
    max_websocket_message_bytes: ByteCount = Field(
        16 << 20,
        gt=0,
        description="Maximum size of a WebSocket message, in bytes; a larger one closes the connection with "
        "code 1009.",
    )
    websocket_compression: bool = Field(
        False,
        description="Whether WebSocket messages are compressed if the client supports it "
        "(permessage-deflate). Compression costs CPU time in the proxies, and about 300 kB of memory per "
        "connection.",
    )
    max_websocket_inflation_ratio: float = Field(
        200.0,
        ge=1,
        description="Maximum ratio of the size of a WebSocket message to its compressed size; beyond it, "
        "the connection is closed with code 1009. The first MiB of a message does not count.",
    )
    max_websocket_inflation_per_s: ByteCount = Field(
        16 << 20,
        gt=0,
        description="Maximum rate at which the compressed messages of a WebSocket may expand, in bytes "
        "per second, averaged over 4 seconds; beyond it, the connection is closed with code 1008. Messages "
        "that expand at most twentyfold are exempt, so ordinary messages never reach the limit.",
    )
    keep_alive_timeout_s: float = Field(
        90.0,
        gt=0,
        description="Time in seconds without incoming data after which a connection is closed, between "
        "requests or within a body. The same limit applies to the head of a request, from its first byte "
        "to its end.",
    )
    max_header_bytes: ByteCount = Field(
        64 << 10,
        ge=1024,
        description="Maximum size of a request's line and headers, in bytes; a larger one gets 431.",
    )
    max_headers: int = Field(100, ge=8, description="Maximum number of headers of a request; more get 431.")
    max_connections: int | None = Field(
        None,
        gt=0,
        description="Maximum number of open connections of a proxy, including WebSockets. At the limit, "
        "a new connection replaces one that has been idle for a second, preferably one with an incomplete "
        "request; if there is none, it waits to be accepted. None: three quarters of the file descriptors "
        "of the proxy's process (``ulimit -n``), at most 10,000; Dask and user code use the rest.",
    )
    trusted_forwarders: list[str] = Field(
        default_factory=list,
        description="Addresses and networks of reverse proxies whose ``X-Forwarded-For`` and "
        "``X-Forwarded-Proto`` are trusted, and whose ``X-Request-Timeout-Seconds`` may exceed "
        "``request_timeout_s``.",
    )
    ssl_certfile: str | None = Field(
        None,
        description="Path of the certificate chain in PEM, on the hosts of the proxies. If it is set, the "
        "proxies accept only HTTPS.",
    )
    ssl_keyfile: str | None = Field(
        None, description="Path of the private key in PEM. None: the key is in ``ssl_certfile``."
    )
    ssl_keyfile_password: Annotated[Secret | None, Masked(hidden)] = Field(
        None,
        repr=False,
        description="Password of the private key, if it is encrypted, or a "
        "[reference](SECURITY.md#secrets) to it.",
    )
    take_over: bool = Field(
        False,
        description="For upgrades (docs/upgrading.md): whether the proxies listen on the same port as "
        "those of the previous instance that used the store, as soon as all replicas run.",
    )
    debug: bool = Field(
        False,
        description="Whether error responses contain tracebacks of user code, and the addresses and "
        "replicas in errors of the cluster. Never enable it on a public port.",
    )
    list_routes: bool = Field(
        True,
        description="Whether ``/-/routes`` lists the routes, 404 responses mention it, and ``/-/readyz`` "
        "names deployments without a replica.",
    )

    model_id_parameter: str | None = Field(
        None,
        min_length=1,
        description="Name of the query parameter with the id of the [multiplexed](multiplexing.md) "
        "model, for requests without the header ``serve_multiplexed_model_id``.",
    )
    health_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="Port on which each proxy answers only ``/-/healthz`` and ``/-/readyz``, without TLS "
        "and without the middlewares. It closes when the proxy begins to drain. None: no such port.",
    )
    health_host: str | None = Field(None, description="Address of the health port. None: that of ``host``.")

    @model_validator(mode="before")
    @classmethod
    def _no_host_means_no_proxies(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and "host" in values and values["host"] is None:
            return {**values, "location": Location.NO_SERVER}
        return values

    @field_validator("location", mode="before")
    @classmethod
    def _no_location_means_no_proxies(cls, value: Any) -> Any:
        return Location.NO_SERVER if value is None else value

    @field_validator("server")
    @classmethod
    def _uvicorn_means_asyncio(cls, name: str) -> str:
        return "asyncio" if name == "uvicorn" else name

    @field_validator("trusted_forwarders")
    @classmethod
    def _are_networks(cls, names: list[str]) -> list[str]:
        for name in names:
            ipaddress.ip_network(name, strict=False)
        return names

    @model_validator(mode="after")
    def _key_has_a_certificate(self) -> HTTPOptions:
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_keyfile_password):
            raise ValueError("ssl_keyfile and ssl_keyfile_password need an ssl_certfile")
        return self

    @model_validator(mode="after")
    def _health_has_its_own_port(self) -> HTTPOptions:
        if self.health_port is not None and self.health_port == self.port:
            raise ValueError(f"health_port and port are both {self.port}; choose another health_port")
        return self

    def risks(self) -> list[str]:
        """Return warnings about options that reveal information to clients."""
        found = []
        if self.has_proxies and self.debug:
            found.append(
                "debug=True shows tracebacks of user code and addresses of the cluster to every client that "
                f"reaches {self.host}:{self.port}. Use it for development only."
            )
        is_bare = self.ssl_certfile is None and not self.trusted_forwarders
        if self.has_proxies and self.host in EVERY_ADDRESS and is_bare:
            found.append(
                f"host={self.host!r} accepts unencrypted requests from every network of the proxies' hosts. "
                "Set ssl_certfile for TLS, or host to one address; if a reverse proxy stands in front, name "
                "its address in trusted_forwarders."
            )
        return found

    @property
    def has_proxies(self) -> bool:
        """Whether these options require any proxies."""
        return self.host is not None and self.location not in (None, Location.NO_SERVER)
