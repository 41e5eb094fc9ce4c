"""A queue of tasks in Redis, for the processes of any number of machines.

Each task is a hash; for each queue, sorted sets contain the ids of tasks that wait for their time, are ready,
run, or have ended. A script changes a task and the sets in one step, if the task has the expected revision.
To claim tasks, a script moves their ids to the set of running tasks, so that no other consumer gets them; the
tasks themselves change in a second step. If the consumer is killed between the two steps, the leases end.

All keys have one hash tag, so that a cluster of Redis keeps them together. How much a crash of Redis itself
loses depends on its persistence: with ``appendonly yes`` and ``appendfsync everysec``, one second.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgpack

from daskserve.data.tasks.errors import TaskQueueError
from daskserve.data.tasks.queues.protocol import Change, Lease, QueueStats, check_room, check_same
from daskserve.data.tasks.states import CHANGED, ENDED, FIXED, WAITING, Task, TaskState, claimed
from daskserve.options.fields.secrets import masked

#: Timeout of the server's answer, in seconds.
TIMEOUT_S = 10.0

#: The part of a task that a transition writes as one value.
FIELDS = (*FIXED, *(each for each in CHANGED if each != "lease_until"))

#: The functions of all scripts. ``KEYS[1]`` is the prefix of all keys.
PRELUDE = f"""
local prefix = KEYS[1]
-- Queue "a" with id "b:c" is not queue "a:b" with id "c".
local function quoted(queue) return (string.gsub(string.gsub(queue, '%%', '%%25'), ':', '%%3A')) end
local function task_key(queue, id) return prefix .. ':task:' .. quoted(queue) .. ':' .. id end
local function set_key(queue, place) return prefix .. ':' .. place .. ':' .. queue end
local function held_key(queue, owner) return prefix .. ':held:' .. quoted(queue) .. ':' .. owner end
local function is_waiting(state)
    return {" or ".join(f"state == '{each}'" for each in sorted(WAITING))}
end
local function is_ended(state)
    return {" or ".join(f"state == '{each}'" for each in sorted(ENDED))}
end

local function leave(queue, id, key)
    local before = redis.call('HMGET', key, 'state', 'place', 'owner')
    if before[2] then redis.call('ZREM', set_key(queue, before[2]), id) end
    if before[3] and before[3] ~= '' then redis.call('HDEL', held_key(queue, before[3]), id) end
    if before[1] then redis.call('HINCRBY', set_key(queue, 'counts'), before[1], -1) end
end

-- A task: queue, id, revision, state, owner, due_at, rank, lease, expiry, what is held, value.
local SIZE = 11
local function put(at, now)
    local queue, id, state = ARGV[at], ARGV[at + 1], ARGV[at + 3]
    local key, owner = task_key(queue, id), ARGV[at + 4]
    leave(queue, id, key)
    local place, score = 'running', ARGV[at + 7]
    if is_ended(state) then place, score = 'over', ARGV[at + 8]
    elseif is_waiting(state) then
        if tonumber(ARGV[at + 5]) > now then place, score = 'delayed', ARGV[at + 5]
        else place, score = 'ready', ARGV[at + 6] end
    end
    redis.call('HSET', key, 'revision', ARGV[at + 2], 'state', state, 'place', place, 'owner', owner,
        'rank', ARGV[at + 6], 'lease', ARGV[at + 7], 'expiry', ARGV[at + 8], 'value', ARGV[at + 10])
    redis.call('ZADD', set_key(queue, place), score, id)
    if owner ~= '' then
        redis.call('HSET', held_key(queue, owner), id, ARGV[at + 9])
        redis.call('EXPIRE', held_key(queue, owner), 604800)
    end
    redis.call('HINCRBY', set_key(queue, 'counts'), state, 1)
end
-- A task as `put` takes it, and its payload, name and digest.
local function create(at, now)
    local key = task_key(ARGV[at], ARGV[at + 1])
    leave(ARGV[at], ARGV[at + 1], key)
    redis.call('DEL', key)
    redis.call('HSET', key, 'payload', ARGV[at + SIZE], 'name', ARGV[at + SIZE + 1],
        'digest', ARGV[at + SIZE + 2])
    put(at, now)
end
local function read(queue, id)
    return redis.call('HMGET', task_key(queue, id), 'value', 'payload', 'lease', 'progress')
end
"""
#: ARGV: time, limit, and for each task: its values, payload, name, digest.
ADD = (
    PRELUDE
    + """
local now, limit = tonumber(ARGV[1]), tonumber(ARGV[2])
local STEP, found, room, fresh = SIZE + 3, {}, {}, {}
for at = 3, #ARGV, STEP do
    local queue, key = ARGV[at], task_key(ARGV[at], ARGV[at + 1])
    local kept = redis.call('HMGET', key, 'state', 'expiry', 'name', 'digest')
    local is_there = kept[1] and not (is_ended(kept[1]) and tonumber(kept[2]) <= now)
    if is_there or fresh[key] then
        local name, digest = kept[3], kept[4]
        if fresh[key] then name, digest = fresh[key][1], fresh[key][2] end
        if name ~= ARGV[at + SIZE + 1] or digest ~= ARGV[at + SIZE + 2] then
            return {'conflict', (at - 3) / STEP}
        end
        found[#found + 1] = 0
    else
        if not room[queue] then
            local counts = redis.call('HGETALL', set_key(queue, 'counts'))
            room[queue] = 0
            for i = 1, #counts, 2 do
                if is_waiting(counts[i]) then room[queue] = room[queue] + tonumber(counts[i + 1]) end
            end
        end
        if limit >= 0 and room[queue] + 1 > limit then return {'full', room[queue]} end
        room[queue] = room[queue] + 1
        fresh[key] = {ARGV[at + SIZE + 1], ARGV[at + SIZE + 2]}
        found[#found + 1] = 1
    end
end
for at = 3, #ARGV, STEP do
    if found[(at - 3) / STEP + 1] == 1 then create(at, now) end
end
return {'added', found}
"""
)
#: ARGV: for each change: the revision before, the task's values, and 1 with the values of its letter, or 0.
WRITE = (
    PRELUDE
    + """
local found, at = {}, 1
while at <= #ARGV do
    local key, letter = task_key(ARGV[at + 1], ARGV[at + 2]), at + SIZE + 2
    local has_letter = ARGV[letter - 1] == '1'
    if redis.call('HGET', key, 'revision') == ARGV[at] then
        put(at + 1, -1)
        found[#found + 1] = 1
        if has_letter and redis.call('EXISTS', task_key(ARGV[letter], ARGV[letter + 1])) == 0 then
            create(letter, -1)
        end
    else
        found[#found + 1] = 0
    end
    at = letter + (has_letter and SIZE + 3 or 0)
end
return found
"""
)
#: ARGV: queue, time, limit, end of the lease.
CLAIM = (
    PRELUDE
    + """
local queue, now = ARGV[1], tonumber(ARGV[2])
local ready, delayed = set_key(queue, 'ready'), set_key(queue, 'delayed')
for _, id in ipairs(redis.call('ZRANGEBYSCORE', delayed, '-inf', ARGV[2], 'LIMIT', 0, 1000)) do
    local key = task_key(queue, id)
    local rank = redis.call('HGET', key, 'rank')
    redis.call('ZREM', delayed, id)
    if rank then -- otherwise the server has evicted it
        redis.call('ZADD', ready, rank, id)
        redis.call('HSET', key, 'place', 'ready')
    end
end
local found = {}
for _, id in ipairs(redis.call('ZRANGE', ready, 0, tonumber(ARGV[3]) - 1)) do
    redis.call('ZREM', ready, id)
    redis.call('ZADD', set_key(queue, 'running'), ARGV[4], id)
    redis.call('HSET', task_key(queue, id), 'place', 'running')
    found[#found + 1] = read(queue, id)
end
return found
"""
)
#: ARGV: queue, owner, new end, ids.
RENEW = (
    PRELUDE
    + """
for at = 4, #ARGV do
    local key = task_key(ARGV[1], ARGV[at])
    if redis.call('HGET', key, 'owner') == ARGV[2] then
        redis.call('HSET', key, 'lease', ARGV[3])
        redis.call('ZADD', set_key(ARGV[1], 'running'), ARGV[3], ARGV[at])
    end
end
"""
)
#: ARGV: queue, time, limit. A task whose claim was interrupted is ready again.
EXPIRED = (
    PRELUDE
    + """
local found, queue = {}, ARGV[1]
local running = set_key(queue, 'running')
for _, id in ipairs(redis.call('ZRANGEBYSCORE', running, '-inf', ARGV[2], 'LIMIT', 0, ARGV[3])) do
    local key = task_key(queue, id)
    local state = redis.call('HGET', key, 'state')
    if not state then redis.call('ZREM', running, id)
    elseif is_waiting(state) then
        redis.call('ZREM', running, id)
        redis.call('ZADD', set_key(queue, 'ready'), redis.call('HGET', key, 'rank'), id)
        redis.call('HSET', key, 'place', 'ready')
    else found[#found + 1] = read(queue, id) end
end
return found
"""
)
#: ARGV: queue, time, limit.
PURGE = (
    PRELUDE
    + """
local ids = redis.call('ZRANGEBYSCORE', set_key(ARGV[1], 'over'), '-inf', ARGV[2], 'LIMIT', 0, ARGV[3])
for _, id in ipairs(ids) do
    local key = task_key(ARGV[1], id)
    leave(ARGV[1], id, key)
    redis.call('DEL', key)
end
return #ids
"""
)
#: ARGV: queue, id, attempt, progress.
NOTE = (
    PRELUDE
    + """
local key = task_key(ARGV[1], ARGV[2])
local owner = redis.call('HGET', key, 'owner')
if owner and owner ~= '' then
    local held = redis.call('HGET', held_key(ARGV[1], owner), ARGV[2])
    if held and string.match(held, '^%d+') == ARGV[3] then redis.call('HSET', key, 'progress', ARGV[4]) end
end
"""
)


class RedisQueue:
    """A `daskserve.data.tasks.queues.protocol.TaskQueue` in Redis."""

    def __init__(self, url: str, prefix: str) -> None:
        try:
            import redis
        except ImportError as error:
            raise ValueError(
                f'the Python package redis cannot be imported ({error}); pip install "daskserve[redis]" on '
                "every machine that submits or runs tasks"
            ) from None
        self._url, self._error = url, redis.RedisError
        self._prefix = f"{{{prefix}}}"
        self._client: Any = redis.Redis.from_url(
            url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S
        )
        self._scripts = {
            text: self._client.register_script(text)
            for text in (ADD, WRITE, CLAIM, RENEW, EXPIRED, PURGE, NOTE)
        }

    def __repr__(self) -> str:
        return f"<RedisQueue {masked(self._url)} {self._prefix}>"

    def _run(self, script: str, *args: Any) -> Any:
        with self._translated():
            return self._scripts[script](keys=[self._prefix], args=args)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (self._error, OSError) as error:
            reason = masked(str(error)).rstrip(".")
            raise TaskQueueError(
                f"The queue of tasks at {masked(self._url)} cannot be used: {reason}. Check that the Redis "
                "server runs, and that this machine can reach it."
            ) from None

    def _key(self, kind: str, queue: str, more: str = "") -> str:
        if more:  # quoted as in `PRELUDE`
            queue = queue.replace("%", "%25").replace(":", "%3A")
        return f"{self._prefix}:{kind}:{queue}{more}"

    # ---- lifecycle

    def open(self) -> None:
        with self._translated():
            self._client.ping()

    def close(self) -> None:
        self._client.close()

    # ---- submitting

    def add(self, tasks: Sequence[Task], max_waiting: int, now: float) -> list[tuple[Task, bool]]:
        args = [part for task in tasks for part in _new_values(task)]
        answer, found = self._run(ADD, repr(now), max_waiting, *args)
        if answer == b"full":
            check_room(tasks[0].queue, int(found), 1, max_waiting)
        if answer == b"conflict":
            given = tasks[int(found)]
            kept = [*self.get(given.queue, [given.id]), *(each for each in tasks if each.id == given.id)]
            check_same(next(each for each in kept if each is not None), given)
        results: list[tuple[Task, bool]] = []
        for task, is_new in zip(tasks, found, strict=True):
            (current,) = (None,) if is_new else self.get(task.queue, [task.id])
            results.append((current or task, bool(is_new)))
        return results

    # ---- consuming

    def claim(self, queue: str, owner: str, limit: int, now: float, lease_s: float) -> list[Task]:
        rows = self._run(CLAIM, queue, repr(now), limit, repr(now + lease_s))
        tasks = [claimed(_task(row), owner, now, lease_s) for row in rows if row[0] is not None]
        written = self.write(list(map(Change, tasks))) if tasks else []
        return [task for task, is_written in zip(tasks, written, strict=True) if is_written]

    def renew(self, queue: str, owner: str, ids: Iterable[str], until: float) -> None:
        self._run(RENEW, queue, owner, repr(until), *ids)

    def held(self, queue: str, owner: str) -> list[Lease]:
        with self._translated():
            found = self._client.hgetall(self._key("held", queue, f":{owner}"))
        leases = []
        for id, text in found.items():
            attempts, _, mark = text.decode().partition(":")
            leases.append(Lease(id.decode(), int(attempts), mark == "1"))
        return leases

    def write(self, changes: Sequence[Change]) -> list[bool]:
        args: list[Any] = []
        for change in changes:
            letter = (0,) if change.letter is None else (1, *_new_values(change.letter))
            args += (change.revision, *_values(change.task), *letter)
        return list(map(bool, self._run(WRITE, *args))) if changes else []

    def note(self, queue: str, id: str, attempts: int, progress: bytes) -> None:
        self._run(NOTE, queue, id, attempts, progress)

    # ---- maintenance

    def expired(self, queue: str, now: float, limit: int) -> list[Task]:
        return [_task(row) for row in self._run(EXPIRED, queue, repr(now), limit)]

    def purge(self, queue: str, now: float, limit: int) -> int:
        return int(self._run(PURGE, queue, repr(now), limit))

    # ---- reading

    def get(self, queue: str, ids: Sequence[str]) -> list[Task | None]:
        with self._translated():
            pipeline = self._client.pipeline(transaction=False)
            for id in ids:
                pipeline.hmget(self._key("task", queue, f":{id}"), "value", "payload", "lease", "progress")
            return [None if row[0] is None else _task(row) for row in pipeline.execute()]

    def tasks(self, queue: str, state: TaskState, limit: int) -> list[Task]:
        places = ("delayed", "ready") if state in WAITING else ("over",) if state in ENDED else ("running",)
        found: list[Task] = []
        for place in places:
            with self._translated():
                ids = self._client.zrange(self._key(place, queue), 0, -1)
            for start in range(0, len(ids), 500):
                part = [each.decode() for each in ids[start : start + 500]]
                found += [each for each in self.get(queue, part) if each is not None and each.state is state]
                if len(found) >= limit:
                    return found[:limit]
        return found

    def stats(self, queue: str, now: float) -> QueueStats:
        with self._translated():
            pipeline = self._client.pipeline(transaction=False)
            pipeline.hgetall(self._key("counts", queue))
            pipeline.zrange(self._key("ready", queue), 0, 0)
            pipeline.zrange(self._key("delayed", queue), 0, 0, withscores=True)
            counts, ready, delayed = pipeline.execute()
        heads = [score for _, score in delayed]
        heads += [each.due_at for each in self.get(queue, [id.decode() for id in ready]) if each is not None]
        oldest_s = max(0.0, now - min(heads)) if heads else 0.0
        return QueueStats({state.decode(): int(amount) for state, amount in counts.items()}, oldest_s)


def _values(task: Task) -> tuple[Any, ...]:
    """Return the values of a task for `PRELUDE`'s ``put``."""
    # Ordered by priority, then by time in milliseconds. This takes less than 53 bits, so it is exact as a
    # score.
    rank = (100 - task.priority) * 2**42 + int(task.due_at * 1000)
    held = f"{task.attempts}:{int(task.is_cancelled)}"
    value = msgpack.packb([getattr(task, each) for each in FIELDS])
    due_at, lease, expiry = repr(task.due_at), repr(task.lease_until), repr(task.expires_at)
    state = str(task.state)
    return task.queue, task.id, task.revision, state, task.owner, due_at, rank, lease, expiry, held, value


def _new_values(task: Task) -> tuple[Any, ...]:
    """Return the values of a task for `PRELUDE`'s ``create``."""
    return *_values(task), task.payload, task.name, task.digest


def _task(row: Sequence[Any]) -> Task:
    value, payload, lease, progress = row
    values = dict(zip(FIELDS, msgpack.unpackb(value), strict=True))
    values["state"] = TaskState(values["state"])
    return Task(**values, payload=payload, lease_until=float(lease), progress=progress)
