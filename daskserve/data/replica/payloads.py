"""The payload log of a replica: it samples requests, and a thread writes the samples."""

from __future__ import annotations

import asyncio
import base64
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import Any

from daskserve.common.clock import Clock
from daskserve.common.types import ActorRequest, split_deployment_tag
from daskserve.data.replica.requests.replica_request import LocalRequest
from daskserve.data.replica.requests.sampled import SampledRequest
from daskserve.options.fields.pickled import PICKLED
from daskserve.options.fields.secrets import masked
from daskserve.options.start_messages import ReplicaStart
from daskserve.payload.importing import import_definition
from daskserve.payload.pickling import load_bytes
from daskserve.telemetry.payloads.events import Origin, Sample
from daskserve.telemetry.payloads.writer import PayloadWriter, open_sink
from daskserve.telemetry.table import MetricSample

#: How long a replica waits for the last samples to be written when it stops or gets another sink.
CLOSE_S = 2.0


class ReplicaPayloads:
    """Samples a replica's requests for the payload log; see the module.

    Attributes
    ----------
    is_on : bool
        Whether any request may be sampled.
    """

    def __init__(self, start: ReplicaStart, instance: str, clock: Clock, rng: Random) -> None:
        application, deployment = split_deployment_tag(start.backend_tag)
        self._origin = Origin(instance, application, deployment, start.replica_tag.rpartition("#")[2])
        self._labels = (instance, start.backend_tag)
        self._clock, self._rng = clock, rng
        self._config: Mapping[str, Any] = {}
        self._writer: PayloadWriter | None = None
        self._ended: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self.is_on = False
        self._open(getattr(start.config, "payload_logging", None))

    def _open(self, config: Mapping[str, Any] | None) -> None:
        self._config = config or {}
        self.is_on = bool(config) and self._config["sampling_ratio"] > 0
        if self.is_on:
            self._writer = PayloadWriter(
                self._origin,
                partial(open_sink, self._config["sink"]),
                partial(_redact, self._config["redact"]),
                mode=self._config["mode"],
                flush_period_s=self._config["flush_period_s"],
                masked=masked,
            )

    async def configure(self, config: Mapping[str, Any] | None) -> None:
        """Use other options from now on; None turns sampling off. Idempotent."""
        if (config or {}) == self._config:
            return
        writer, self._writer = self._writer, None
        self._open(config)
        if writer is not None:
            await asyncio.to_thread(writer.close, CLOSE_S)
            for name, labels, count in writer.counts(self._labels):
                self._ended[name, labels] += count

    def sampled(
        self, request: LocalRequest, counted: Callable[[LocalRequest], ActorRequest] | None
    ) -> ActorRequest:
        """Return a request; a random selection of requests is sampled."""
        whole = request if counted is None else counted(request)
        writer, ratio = self._writer, self._config["sampling_ratio"]
        if writer is None or (ratio < 1 and self._rng.random() >= ratio):
            return whole
        take = partial(self._take, writer)
        return SampledRequest(whole, request, self._config["max_bytes"], self._clock.wall(), take)

    def _take(self, writer: PayloadWriter, sample: Sample) -> None:
        if writer is self._writer:
            writer.offer(sample)
        else:
            # The options have changed since the request began, so the sample lacks the new ``redact``.
            self._ended["payload_log_dropped", (*self._labels, "stop")] += 1

    def samples(self) -> list[MetricSample]:
        """Return the metrics."""
        if self._writer is None and not self._ended:
            return []
        found = Counter(self._ended)
        if self._writer is not None:
            for name, labels, count in self._writer.counts(self._labels):
                found[name, labels] += count
        return [(name, labels, count) for (name, labels), count in found.items()]


def _redact(option: str | None) -> Any:
    if option is None:
        return None
    if option.startswith(PICKLED):
        return load_bytes(base64.b64decode(option.removeprefix(PICKLED)))
    return import_definition(option)
