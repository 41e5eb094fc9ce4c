"""Start messages and reconfigurations of replicas, by the options that a test names."""

from __future__ import annotations

from typing import Any

from daskserve.options.backend import BackendConfig
from daskserve.options.start_messages import ReplicaStart, dump_config
from daskserve.payload import pickling


def replica_start(
    definition: Any,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    backend_tag: str = "b",
    replica_tag: str = "b#AAAAAA",
    concurrency: int,
    user_config: bytes | None = None,
    debug: bool = False,
    is_async: bool = False,
    environment: str | None = None,
    **options: Any,
) -> ReplicaStart:
    """Return the start message of a replica; ``options`` are those of `BackendConfig`."""
    return ReplicaStart(
        tracing={},
        backend_tag=backend_tag,
        replica_tag=replica_tag,
        code=pickling.dump_bytes((definition, args, kwargs or {})),
        config=BackendConfig(**options),
        concurrency=concurrency,
        user_config=user_config,
        environment=environment,
        debug=debug,
        is_async=is_async,
        code_name="b@1",
        rank_info=(0, 0, 0, 1),
        actors={},
        actor_of=(),
        gang=(),
        bundles=(),
        is_deployment=False,
        models=None,
        is_exact=False,
    )


def reconfiguration(
    concurrency: int = 4,
    user_config: bytes | None = None,
    rank_info: tuple[int, int, int, int] = (0, 0, 0, 1),
    **options: Any,
) -> dict[str, Any]:
    """Return the message of the verb ``reconfigure``."""
    config = dump_config(BackendConfig(**options))
    return {"concurrency": concurrency, "user_config": user_config, "config": config, "rank_info": rank_info}
