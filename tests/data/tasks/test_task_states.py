"""The life of a task: the table of its states."""

from __future__ import annotations

from dataclasses import replace

import pytest

from daskserve.data.tasks import states
from daskserve.data.tasks.errors import TaskConflictError
from daskserve.data.tasks.states import ENDED, TRANSITIONS, RetryRules, Task, TaskEvent, TaskState

RULES = RetryRules(max_retries=2, backoff_s=1.0, max_backoff_s=3.0, jitter=0.5, max_losses=1, result_ttl_s=60)
TASK = Task("a", "q", "work", b"", created_at=0.0, due_at=0.0)


def running(task: Task = TASK, now: float = 1.0) -> Task:
    return states.claimed(task, "me", now, lease_s=10.0)


def test_a_task_is_claimed_and_done() -> None:
    begun = running()
    assert (begun.state, begun.owner, begun.lease_until, begun.attempts) == (TaskState.RUNNING, "me", 11.0, 1)
    done = states.done(begun, b"result", 5.0, RULES)
    assert (done.state, done.result, done.ended_at, done.expires_at) == (TaskState.DONE, b"result", 5.0, 65.0)
    assert (done.owner, done.revision) == ("", 2)


def test_a_task_that_fails_waits_longer_each_time_and_fails_for_good() -> None:
    task, delays = TASK, []
    for _ in range(2):
        task = states.failed(running(task), "error", 100.0, 0.0, RULES)
        assert task.state is TaskState.RETRY
        delays.append(task.due_at - 100.0)
    assert delays == [1.0, 2.0]
    task = states.failed(running(task), "error", 100.0, 0.0, RULES)
    assert (task.state, task.error, task.attempts) == (TaskState.FAILED, "error", 3)
    assert [RULES.delay_s(9, chance) for chance in (0.0, 1.0)] == [3.0, 1.5]


def test_a_task_given_back_was_not_attempted() -> None:
    task = states.released(running(), 2.0, RULES)
    assert (task.state, task.attempts, task.retries) == (TaskState.QUEUED, 0, 0)


def test_a_task_that_kills_its_consumers_is_dead_after_some() -> None:
    once = states.lost(running(), 2.0, RULES)
    assert (once.state, once.losses, once.retries) == (TaskState.QUEUED, 1, 0)
    twice = states.lost(running(once), 3.0, RULES)
    assert twice.state is TaskState.DEAD
    assert "lost 2 times" in twice.error


def test_cancelling_ends_a_task_that_waits_and_marks_one_that_runs() -> None:
    assert states.cancelled(TASK, 1.0, RULES).state is TaskState.CANCELLED
    marked = states.cancelled(running(), 1.0, RULES)
    assert (marked.state, marked.is_cancelled, marked.owner) == (TaskState.RUNNING, True, "me")
    for end in (
        states.released(marked, 2.0, RULES),
        states.lost(marked, 2.0, RULES),
        states.failed(marked, "error", 2.0, 0.0, RULES),
    ):
        assert (end.state, end.owner) == (TaskState.CANCELLED, "")
    assert states.done(marked, b"", 2.0, RULES).state is TaskState.DONE  # it came too late


def test_a_failed_task_can_be_queued_again() -> None:
    failed = states.failed(running(), "error", 2.0, 0.0, RULES, is_final=True)
    again = states.requeued(failed, 9.0)
    assert (again.state, again.retries, again.error, again.expires_at) == (TaskState.QUEUED, 0, "", 0.0)


def test_each_transition_grows_the_revision_and_no_other_exists() -> None:
    for state in TaskState:
        for event in TaskEvent:
            task = replace(TASK, state=state, revision=5)
            if (state, event) in TRANSITIONS:
                after = states.move(task, event, 1.0)
                assert after.revision == 6
                assert bool(after.ended_at) == (after.state in ENDED)
            else:
                with pytest.raises(TaskConflictError, match="cannot be"):
                    states.move(task, event, 1.0)
    assert not any(state is TaskState.DONE for state, _ in TRANSITIONS)
