"""Classic batching: many requests in one call of the user's code.

A callable marked with `accept_batch` gets a list of requests and returns a list of the same length. The
worker's loop forms the batches (`daskserve.data.replica.requests.batches`); `Batch` runs one on the user's
side.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from daskserve.common.types import Payload, Receive, nothing_to_receive
from daskserve.data.batching.results import as_results
from daskserve.data.replica.errors.log import NOT_FAILURES, pack_raised
from daskserve.data.replica.user_code.definitions import ACCEPT_BATCH
from daskserve.data.replica.user_code.request_objects import HTTPRequest, ServeRequest, legacy_argument
from daskserve.data.replica.user_code.responses import (
    ConvertedResponse,
    Unfinished,
    dump_result,
    raised_response,
    to_response,
)
from daskserve.data.version_counts import counted_batch
from daskserve.errors import UserCodeError

if TYPE_CHECKING:
    from daskserve.telemetry.tracing.span import RecordedSpan

CallableT = TypeVar("CallableT", bound=Callable[..., Any])


def accept_batch(callable_: CallableT) -> CallableT:
    """Mark a function, a method or a class that takes a list of requests.

    ``max_batch_size`` and ``batch_wait_timeout`` are options of the backend. The function must return one
    result per request, in order; a result that is an exception fails only its request.

    Examples
    --------
    >>> @accept_batch
    ... def double(requests):
    ...     return [2 * int(request.query_params["n"]) for request in requests]
    """
    setattr(callable_, ACCEPT_BATCH, True)
    return callable_


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One request of a batch: an HTTP scope with the whole body, or the head and payload of a call."""

    head: Mapping[str, Any]
    scope: MutableMapping[str, Any] | None = None
    body: bytes = b""
    payload: Payload | None = None
    #: The span of the item's wait and its batch, if the request is sampled.
    span: RecordedSpan | None = None

    def request(self, receive: Receive) -> HTTPRequest | ServeRequest | Any:
        """Return the request object for user code."""
        if self.scope is not None:
            request = HTTPRequest(self.scope, receive)
            request.whole_body = self.body
            return request
        args, kwargs = ((), {}) if self.payload is None else self.payload.load()
        return legacy_argument(self.head, args, kwargs)


#: The outcome of one item: a response, the pickled result of a call, or an error, which may be packed.
ItemOutcome = ConvertedResponse | Unfinished | Payload | Exception


class Batch:
    """One batch in user code: its requests and their outcomes."""

    def __init__(self, name: str, items: Sequence[BatchItem]) -> None:
        self._name = name
        self._items = items
        self._failed: list[ItemOutcome | None] = [None] * len(items)
        #: The outcomes of all items, in order.
        self.outcomes: list[ItemOutcome] = []
        self.requests: list[Any] = []
        for index, item in enumerate(items):
            try:
                self.requests.append(item.request(nothing_to_receive))
            except Exception as error:  # an argument that cannot be read fails only its own request
                self._failed[index] = _failed(item, error)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count the code in the block as one batch; its error becomes the outcome of all requests."""
        try:
            with counted_batch() as results:
                yield
                results.extend(self.outcomes)
        except Exception as error:
            # Packed once for all items.
            packed = error if isinstance(error, NOT_FAILURES) else pack_raised(error) or error
            self.outcomes = [
                _failed(each, packed) if known is None else known for each, known in self._pairs()
            ]

    def split(self, results: Any) -> None:
        """Set the outcomes of all items, given the results of user code."""
        remaining = iter(as_results(self._name, results, len(self.requests)))
        self.outcomes = [
            self._convert(item, next(remaining)) if known is None else known for item, known in self._pairs()
        ]

    def _pairs(self) -> Iterator[tuple[BatchItem, ItemOutcome | None]]:
        return zip(self._items, self._failed, strict=True)

    def _convert(self, item: BatchItem, result: Any) -> ItemOutcome:
        try:
            if isinstance(result, Exception):
                return _failed(item, result)
            if item.scope is not None:
                return to_response(result)
            if isinstance(result, (Generator, AsyncGenerator)):
                raise UserCodeError(
                    f"{self._name} returned a generator for a request of its batch; a callable that takes "
                    "batches returns a single result for each call."
                )
            return dump_result(
                self._name, result, (item.head.get("facts") or {}).get("response_serialization", "")
            )
        except Exception as error:  # a result that cannot be serialized fails only its own request
            return _failed(item, error)


def _failed(item: BatchItem, error: Exception) -> ItemOutcome:
    if item.scope is not None and isinstance(error, NOT_FAILURES):
        return raised_response(error)
    return pack_raised(error) or error


async def answer_batch(
    function: Callable[[list[Any]], Any], name: str, items: Sequence[BatchItem]
) -> list[ItemOutcome]:
    """Let an async function answer a batch."""
    batch = Batch(name, items)
    with batch.answering():
        batch.split(await function(batch.requests) if batch.requests else [])
    return batch.outcomes


def answer_batch_in_thread(
    function: Callable[[list[Any]], Any], name: str, items: Sequence[BatchItem]
) -> list[ItemOutcome]:
    """Let a plain function answer a batch."""
    batch = Batch(name, items)
    with batch.answering():
        batch.split(function(batch.requests) if batch.requests else [])
    return batch.outcomes
