"""A router that sends prompts with a common beginning (prefix) to the replica that has it in its cache.

Problem: a language model does not compute a beginning again if its cache has it, but each replica has its own
cache. If a router only followed the caches, a beginning that all prompts share would send them all to one
replica.

Choice: the router cuts a text into blocks, which become longer towards its end, and hashes each block
together with the hash of the block before it. So a hash names a whole beginning. Of a long block, the router
hashes only the first and the last characters, because hashing all of a long prompt would take longer than the
rest of the choice. Prompts that differ only in between go to the same replica, which then computes a part of
the prompt again. For the same reason, the router does not parse the body of an HTTP request: it compares the
JSON from the prompt on.

For each hash, the router keeps the replicas that last got a text with this beginning. A request goes to the
least loaded of the replicas that have the longest part of its text. If that replica has many more requests
than others, so that waiting would take longer than computing, the request goes to another one. A text with an
unknown beginning goes to the replica that consistent hashing of its first block selects, so all processes
choose the same replica.

The router forgets the least recently used beginnings, in two generations. A beginning that is used moves to
the young generation. When the new generation is full, it becomes the old one, and the previous old one is
dropped. Moving each hash within one ordered dictionary would take a quarter of the time of a choice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from daskserve.data.caller.choice import hash_of
from daskserve.data.caller.request_routers.hashing import ConsistentHashRouter
from daskserve.data.caller.request_routers.interface import (
    PendingRequest,
    ReplicaID,
    ReplicaResult,
    RunningReplica,
)

#: The length and the number of the first blocks; the length of each further block, as a share of all before
#: it; and the number of characters of a text that are compared.
BLOCK_CHARACTERS, FIRST_BLOCKS = 64, 8
GROWTH = 0.5
MAX_CHARACTERS = 32 * 1024
#: How many characters of a block are compared at each of its ends.
END_CHARACTERS = 128
#: Number of messages of a chat that are compared.
MAX_MESSAGES = 256
#: Maximum number of known beginnings, and of replicas for each.
MAX_BEGINNINGS = 50_000
MAX_REPLICAS = 4
#: Maximum number of requests that a replica may have more than the less loaded of two random others.
IMBALANCE = 8
#: Minimum share of a text that must be known.
MATCH = 0.1


def _blocks() -> Iterator[tuple[int, int, int, int]]:
    """Yield each block: its start, the end of its compared head, the start of its compared tail, its end."""
    start = 0
    while start < MAX_CHARACTERS:
        is_first = start < FIRST_BLOCKS * BLOCK_CHARACTERS
        size = BLOCK_CHARACTERS if is_first else max(BLOCK_CHARACTERS, int(GROWTH * start))
        end = min(start + size, MAX_CHARACTERS)
        head = min(start + END_CHARACTERS, end)
        yield start, head, max(head, end - END_CHARACTERS), end
        start = end


_BLOCKS = tuple(_blocks())
_NAMES = ("prompt", "messages", "input", "inputs", "text")
#: The key of a prompt in JSON. Quotes inside a JSON string are escaped with a backslash, so this pattern
#: cannot match inside one.
_KEY = re.compile(rf'"(?:{"|".join(_NAMES)})"\s*:\s*'.encode())


class PrefixAffinityRouter(ConsistentHashRouter):
    """Sends a prompt to the replica that most likely has the longest part of its beginning in its cache."""

    wants_body = True

    def initialize_state(  # type: ignore[override]
        self,
        imbalanced_threshold: float = IMBALANCE,
        match_rate_threshold: float = MATCH,
        max_beginnings: int = MAX_BEGINNINGS,
        **ignored: Any,
    ) -> None:
        """Set the allowed imbalance, the share of a text that must be known, and the number of beginnings.

        Ray Serve's options for the eviction of its tree are accepted without effect.
        """
        unknown = sorted(name for name in ignored if not name.startswith(("do_eviction", "eviction_")))
        if unknown:
            raise TypeError(f"PrefixAffinity has no option {unknown[0]!r}")
        if imbalanced_threshold < 0:
            raise ValueError(f"imbalanced_threshold must not be negative, got {imbalanced_threshold!r}")
        if not 0 <= match_rate_threshold <= 1:
            raise ValueError(f"match_rate_threshold must be from 0 to 1, got {match_rate_threshold!r}")
        if not isinstance(max_beginnings, int) or max_beginnings < 1:
            raise ValueError(f"max_beginnings must be a whole number from 1, got {max_beginnings!r}")
        super().initialize_state()
        self._imbalance, self._match, self._most = imbalanced_threshold, match_rate_threshold, max_beginnings
        #: The replicas that got a text with each beginning, the most recent one first, in two generations.
        self._young: dict[int, tuple[str, ...]] = {}
        self._old: dict[int, tuple[str, ...]] = {}
        self._asked: tuple[PendingRequest, list[int]] | None = None

    def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas that have the longest part of the request's text, then others."""
        text: str | bytes = "" if pending_request is None else text_of(pending_request)
        if pending_request is None or not text:
            return super().choose_replicas(candidate_replicas, pending_request)
        names = beginnings_of(text)
        self._asked = pending_request, names
        near, depth = self._nearest(names)
        if near and depth >= self._match * len(names):
            least, queue_len = near[0], near[0].queue_len
            for each in near[1:]:
                if (length := each.queue_len) < queue_len:
                    least, queue_len = each, length
            # Others are drawn only if this replica has enough requests to be imbalanced.
            if queue_len > self._imbalance:
                other, other_len = self._drawn_beside(least, candidate_replicas)
                if queue_len - other_len > self._imbalance:
                    return [[other], candidate_replicas]
            if least.has_room:
                return [[least], candidate_replicas]
        first = text[:BLOCK_CHARACTERS]
        return self.ranked(hash_of(first if isinstance(first, str) else str(first, "utf-8", "replace")))

    def _drawn_beside(
        self, one: RunningReplica, replicas: list[RunningReplica]
    ) -> tuple[RunningReplica, float]:
        """Return the less loaded of two random replicas, excluding one, and its queue length."""
        count, found, least = len(replicas), one, math.inf
        for _ in range(2):
            place = int(self.rng.random() * count)
            each = replicas[place]
            if each is one:
                each = replicas[place - 1]
            if (length := each.queue_len) < least:
                found, least = each, length
        return found, least

    def _nearest(self, names: Sequence[int]) -> tuple[list[RunningReplica], int]:
        """Return the replicas that have the longest known beginning, and its length in blocks."""
        young, old, by_tag = self._young, self._old, self._by_tag
        low, high = 0, len(names)
        # If a beginning is known, all shorter ones are known.
        while low < high:
            middle = (low + high + 1) // 2
            name = names[middle - 1]
            if name in young or name in old:
                low = middle
            else:
                high = middle - 1
        for depth in range(low, 0, -1):
            name = names[depth - 1]
            found = [by_tag[tag] for tag in young.get(name) or old[name] if tag in by_tag]
            if found:
                return found, depth
        return [], 0

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        """Record that a replica has the beginning of a request's text."""
        if self._asked is None or self._asked[0] is not pending_request:
            return
        names, self._asked = self._asked[1], None
        if len(self._young) + len(names) > self._most // 2:
            self._young, self._old = {}, self._young
        young, old, tag = self._young, self._old, replica_id.unique_id
        alone = (tag,)
        for name in names:
            before = young.get(name)
            if before is None:
                before = old.get(name)
                if before is None:
                    young[name] = alone
                    continue
                young[name] = before
            if before[0] != tag:
                young[name] = (tag, *(each for each in before if each != tag))[:MAX_REPLICAS]


def beginnings_of(text: str | bytes) -> list[int]:
    """Return the names of the beginnings of a text, the shortest first."""
    found, name, length = [], 0, len(text)
    for start, head, tail, end in _BLOCKS:
        if end <= length:
            name = hash((name, text[start:head], text[tail:end]))
        else:  # an incomplete block is not hashed
            name = hash((name, text[start:head], text[max(start, length - END_CHARACTERS) :], length))
        found.append(name)
        if end >= length:
            break
    return found


def text_of(request: PendingRequest) -> str | bytes:
    """Return the prompt of a request: its JSON body from the prompt on, or the prompt in its arguments."""
    if not request.metadata.is_http_request:
        return next(filter(None, map(prompt_in, _arguments_of(request))), "")
    body = request.body
    key = _KEY.search(body, 0, MAX_CHARACTERS)
    begin = 0 if key is None else key.end()
    return body[begin : begin + MAX_CHARACTERS]


def _arguments_of(request: PendingRequest) -> Sequence[Any]:
    try:
        return [*request.args, request.kwargs]
    except Exception:  # unpickling may raise anything
        return ()


def prompt_in(value: Any) -> str:
    """Return the text of a prompt, of chat messages, or of an object with either; empty if there is none."""
    if isinstance(value, str):
        return value
    read = value.get if isinstance(value, Mapping) else partial(getattr, value)
    try:
        for name in _NAMES:
            found = read(name, None)
            # Check the type first, because an array has no truth value.
            if isinstance(found, str) and found:
                return found
            if isinstance(found, (list, tuple)) and found:
                return "\n".join(map(_text_of_message, found[:MAX_MESSAGES]))
    except Exception:  # properties of foreign objects may raise anything
        pass
    return ""


def _text_of_message(message: Any) -> str:
    if isinstance(message, Mapping):
        return f"{message.get('role', '')}: {message.get('content', '')}"
    return str(message)
