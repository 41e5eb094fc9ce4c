"""The options of the policy ``queue``: which queue of which broker it reads."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from daskserve.common.formatting import shown
from daskserve.options.fields.secrets import SecretOption, checked_secret, masked, read_secret

REDIS_SCHEMES = ("redis", "rediss", "unix")
#: URL scheme of daskserve's own queues in a file, with an absolute path: ``sqlite:///var/tasks.sqlite``.
SQLITE_SCHEME = "sqlite"
#: URL scheme of queues that the instance keeps: ``instance://``.
INSTANCE_SCHEME = "instance"
#: Kombu's schemes, and whether they use TLS.
RABBITMQ_SCHEMES: Mapping[str, bool] = {"amqp": False, "pyamqp": False, "amqps": True}
_KINDS: Mapping[str, str] = {SQLITE_SCHEME: "a file", INSTANCE_SCHEME: "tasks of the instance"}
#: Smallest allowed poll interval.
SHORTEST_POLL_S = 0.1
#: A length is stale after this many poll intervals.
FRESH_POLLS = 3


@dataclass(frozen=True, slots=True)
class ManagementURL:
    """The address of RabbitMQ's management API for one queue, with the credentials."""

    base: str
    vhost: str
    username: str
    password: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """The ``policy_kwargs`` of the policy ``queue``, checked.

    Parameters
    ----------
    broker_url : str or reference
        ``redis://``, ``rediss://``, ``unix://`` or ``amqp://`` (``amqps://``), as Celery and Kombu write it,
        ``sqlite://`` with the path of a file of tasks, or ``instance://`` for tasks that the instance keeps;
        or a reference to it (`daskserve.options.fields.secrets`).
    queue_name : str
        The queue; with Redis, the key of the list.
    rabbitmq_management_url : str or reference, optional
        Address of RabbitMQ's management API, or a reference to it. None: the broker's host, at
        the default port.
    poll_interval_s : float
        How often the broker is polled, in seconds.

    Raises
    ------
    ValueError
        An option is invalid; the message names it and shows no credentials.
    """

    broker_url: SecretOption = field(repr=False)
    queue_name: str
    rabbitmq_management_url: SecretOption | None = field(default=None, repr=False)
    poll_interval_s: float = 10.0

    def __post_init__(self) -> None:
        if not self.has_references:
            self._check_broker()
        for name in ("broker_url", "rabbitmq_management_url") if self.has_references else ():
            try:
                checked_secret(getattr(self, name))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        self._check_rest()

    @property
    def has_references(self) -> bool:
        """Whether a URL is a reference, which `resolved` reads."""
        return isinstance(self.broker_url, Mapping) or isinstance(self.rabbitmq_management_url, Mapping)

    def resolved(self, variables: Mapping[str, str]) -> QueueOptions:
        """Return the options with the URLs that they refer to. This may read files.

        Raises
        ------
        ValueError
            There is no such variable or file, or its content is not a valid URL.
        """
        changes: dict[str, Any] = {
            name: read_secret(value, name, variables)
            for name in ("broker_url", "rabbitmq_management_url")
            if (value := getattr(self, name)) is not None
        }
        return replace(self, **changes)

    @property
    def url(self) -> str:
        """The broker's URL, in options without references."""
        assert isinstance(self.broker_url, str)
        return self.broker_url

    @property
    def management_url(self) -> str | None:
        """Address of RabbitMQ's management API, in options without references."""
        assert isinstance(self.rabbitmq_management_url, str | None)
        return self.rabbitmq_management_url

    def _check_broker(self) -> None:
        parts = _split("broker_url", self.broker_url)
        known = (*REDIS_SCHEMES, *RABBITMQ_SCHEMES, SQLITE_SCHEME, INSTANCE_SCHEME)
        if parts.scheme not in known:
            raise ValueError(
                f"broker_url is {masked(self.broker_url)!r}; give a URL that begins with one of "
                f'{", ".join(f"{scheme}://" for scheme in known)}, such as "redis://localhost:6379/0"'
            )
        if parts.scheme == "unix" and not parts.path:
            raise ValueError('broker_url is "unix://" without a path; write "unix:///run/redis/redis.sock"')
        if parts.scheme == INSTANCE_SCHEME and (parts.netloc or parts.path):
            raise ValueError(
                f'broker_url is {masked(self.broker_url)!r}; write "instance://" for tasks of this instance'
            )
        if parts.scheme == SQLITE_SCHEME and (parts.netloc not in ("", "~") or len(parts.path) < 2):
            raise ValueError(
                f"broker_url is {masked(self.broker_url)!r}; give an absolute path, or one with ~, such as "
                '"sqlite:///var/lib/tasks.sqlite" or "sqlite://~/.daskserve/tasks.sqlite"'
            )
        self._check_management(parts)

    def _check_rest(self) -> None:
        if not isinstance(self.queue_name, str) or not self.queue_name:
            raise ValueError(f"queue_name is {masked(self.queue_name)!r}; give the name of a queue")
        interval_s: Any = self.poll_interval_s
        if isinstance(interval_s, bool) or not isinstance(interval_s, int | float):
            raise ValueError(f"poll_interval_s is {masked(interval_s)!r}; give a number of seconds")
        if not SHORTEST_POLL_S <= interval_s < math.inf:
            raise ValueError(
                f"poll_interval_s is {interval_s}; give a number of seconds, {shown(SHORTEST_POLL_S)} or more"
            )

    def _check_management(self, broker: SplitResult) -> None:
        given = self.rabbitmq_management_url
        if given is None:
            if self.is_rabbitmq and not broker.hostname:
                raise ValueError(
                    f"broker_url is {masked(self.broker_url)!r}, without a host; add the host, or give the "
                    "address of RabbitMQ's management API as rabbitmq_management_url"
                )
            return
        if not self.is_rabbitmq:
            raise ValueError(
                f"rabbitmq_management_url is given, but broker_url is {masked(self.broker_url)!r}; omit "
                f"rabbitmq_management_url for {_KINDS.get(broker.scheme, 'Redis')}"
            )
        parts = _split("rabbitmq_management_url", given)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f'rabbitmq_management_url is {masked(given)!r}; give a URL such as "http://localhost:15672"'
            )

    @classmethod
    def parse(cls, arguments: Mapping[str, Any]) -> QueueOptions:
        """Return the options in ``policy_kwargs``.

        Raises
        ------
        ValueError
            An option is missing, unknown or invalid.
        """
        try:
            inspect.signature(cls).bind(**arguments)
        except TypeError as error:
            raise ValueError(
                f'policy "queue" has policy_kwargs={masked(dict(arguments))!r}: {error}; it needs a '
                'broker_url and a queue_name, such as {"broker_url": "redis://localhost:6379/0", '
                '"queue_name": "celery"}, and takes rabbitmq_management_url and poll_interval_s'
            ) from None
        return cls(**arguments)

    @property
    def is_rabbitmq(self) -> bool:
        """Whether the broker is RabbitMQ."""
        return urlsplit(self.url).scheme in RABBITMQ_SCHEMES

    @property
    def is_of_instance(self) -> bool:
        """Whether the instance keeps the queue."""
        return urlsplit(self.url).scheme == INSTANCE_SCHEME

    @property
    def file(self) -> str | None:
        """The path of the file of a queue; None for other queues."""
        parts = urlsplit(self.url)
        return unquote(parts.netloc + parts.path) if parts.scheme == SQLITE_SCHEME else None

    @property
    def max_age_s(self) -> float:
        """The age at which a length is stale, in seconds."""
        return FRESH_POLLS * self.poll_interval_s

    def management(self) -> ManagementURL:
        """Return the management API of the queue; credentials in its own URL take precedence."""
        broker = urlsplit(self.url)
        is_tls = RABBITMQ_SCHEMES[broker.scheme]
        # As in Kombu, a URL without a virtual host means "/".
        vhost = unquote(broker.path[1:]) or "/"
        if self.management_url is None:
            host = f"[{broker.hostname}]" if ":" in (broker.hostname or "") else broker.hostname
            base, asker = (f"https://{host}:15671" if is_tls else f"http://{host}:15672"), broker
        else:
            given = urlsplit(self.management_url)
            # The URL may point to the API or to the web interface.
            path = given.path.rstrip("/").removesuffix("/api")
            base = f"{given.scheme}://{given.netloc.rpartition('@')[2]}{path}"
            asker = given if given.username is not None else broker
        return ManagementURL(
            base, vhost, unquote(asker.username or "guest"), unquote(asker.password or "guest")
        )


def queue_options_of(policy: Any, arguments: Mapping[str, Any]) -> QueueOptions | None:
    """Return the queue that a policy, or the policy within a schedule, reads; None if it reads none.

    Raises
    ------
    ValueError
        The options of the queue are invalid.
    """
    if policy == "schedule":
        policy, arguments = arguments.get("policy"), arguments.get("policy_kwargs", {})
    if policy != "queue":
        return None
    if not isinstance(arguments, Mapping):
        raise ValueError(f"policy_kwargs is {masked(arguments)!r}; give a dict of keyword arguments")
    return QueueOptions.parse(arguments)


def _split(name: str, url: Any) -> SplitResult:
    if not isinstance(url, str):
        raise ValueError(f"{name} is of type {type(url).__name__}; give a URL as a string")
    try:
        parts = urlsplit(url)
        _ = parts.port  # the port is only validated on access
    except ValueError as error:
        # The error may quote credentials.
        raise ValueError(f"{name} is {masked(url)!r}, which is not a URL: {masked(str(error))}") from None
    return parts
