"""Keeps the replicas' loaded models as configured: reads folders, writes records, and calls replicas.

Each step compares the records with the reports of replicas. A new controller therefore continues where the
last one stopped, and a replica that missed a call gets it again a second later.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from daskserve.cluster.protocols.base import Cluster
from daskserve.common.clock import Clock
from daskserve.common.types import BackendTag, ReplicaTag, short_tag
from daskserve.control.decisions.model_rollouts import advanced, followed
from daskserve.control.decisions.rollout_plan import phase_began
from daskserve.control.observed.observed import Observed
from daskserve.control.records.model_decisions import (
    Folder,
    adopted,
    is_met,
    polled,
    rollouts_of,
    settled,
    target,
)
from daskserve.control.records.models import ModelReport, ModelsRecord, rollout_tag
from daskserve.control.records.records import BackendRecord, Change, ReplicaRecord
from daskserve.control.records.rollout import RolloutState
from daskserve.control.records.state import State
from daskserve.control.records.storing.writer import Writer
from daskserve.errors import ServeError, StaleEpochError
from daskserve.loops.tasks import TaskSet
from daskserve.options.environment import ModelRepository
from daskserve.options.rollout import RolloutConfig
from daskserve.payload.error_text import summary_of
from daskserve.payload.model_files import list_models, state_of_version

logger = logging.getLogger("daskserve.controller")

#: Interval of the steps; replicas report as often.
PERIOD_S = 1.0
#: Time limit of a call to a replica, which loads the models afterwards.
CALL_S = 5.0


@dataclass(slots=True)
class _Poll:
    """The last reading of a backend's model folder: its content, and the files of new versions."""

    url: str
    due: float = -math.inf
    is_busy: bool = False
    folder: Folder | None = None
    seen: Mapping[str, str] = field(default_factory=dict)


class ModelReconciler:
    """The loop that keeps models loaded; one per controller."""

    def __init__(
        self, cluster: Cluster, clock: Clock, state: State, observed: Observed, writer: Writer
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._state = state
        self._observed = observed
        self._writer = writer
        self._tasks = TaskSet(logger)
        self._busy: set[str] = set()
        self._polls: dict[BackendTag, _Poll] = {}
        #: The phase of each rollout of a model, and when it began.
        self._phases: dict[tuple[BackendTag, str], tuple[str, float]] = {}

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            try:
                await self.step()
            except StaleEpochError:
                return  # the reconcile loop logs it
            except (ServeError, OSError) as error:
                logger.warning("A step of the models failed and is retried: %s", error)
            except Exception:
                logger.exception("A step of the models failed and is retried")
            await self._clock.sleep(PERIOD_S)

    async def stop(self) -> None:
        """Cancel the calls in progress."""
        await self._tasks.close(timeout_s=2)
        self._observed.folders.close()

    async def step(self) -> None:
        """Write the changes that follow from folders and replicas' reports, then call the replicas."""
        self._note_phases()
        if self._changes():
            async with self._writer:
                await self._writer.note(self._changes())
        repositories = self._repositories()
        for gone in self._polls.keys() - repositories.keys():
            del self._polls[gone]
        for tag, repository in repositories.items():
            if repository.mode == "poll":
                self._read_if_due(tag, repository)
            if (record := self._state.models.get(tag)) is not None:
                self._notify(record, repository.rollout)

    def _repositories(self) -> dict[BackendTag, ModelRepository]:
        return {
            tag: each.config.model_repository
            for tag, each in self._state.backends.items()
            if each.config.model_repository is not None and not each.is_deleting
        }

    def _changes(self) -> Change:
        repositories = self._repositories()
        removed = self._state.models.keys() - repositories.keys()
        change: Change = {self._state.models[tag].key: None for tag in removed}
        for tag, repository in repositories.items():
            before, reports = self._state.models.get(tag), self._reports(self._state.backends[tag])
            record = before or ModelsRecord(tag)
            keep = repository.keep_versions if repository.mode == "poll" else None
            if before is None and keep is not None:
                if None in reports.values():
                    continue  # the replica may have loaded models in its start
                record = adopted(record, reports)
            poll = self._polls.get(tag)
            if keep is not None and poll is not None and poll.folder is not None:
                record = polled(record, poll.folder, keep)
            plan, wall = repository.rollout, self._clock.wall()
            record = settled(record, reports, keep, rolls_out=plan is not None)
            record = followed(record, plan, keep, wall)
            if plan is not None:
                record = advanced(record, plan, self._observed.rollouts, partial(self._phase_s, tag), wall)
            if record != (before or ModelsRecord(tag)):
                change[record.key] = record
        return change

    def _phase_s(self, tag: BackendTag, name: str, rollout: RolloutState) -> float:
        """Return how long the rollout of a model has been in its phase; 0 if the rollout is not recorded
        yet."""
        mark, began = self._phases.get((tag, name), ("", 0.0))
        return self._clock.now() - began if mark == rollout.mark else 0.0

    def _note_phases(self) -> None:
        """Record when the phases of rollouts began, and drop the counts of rollouts that have ended."""
        now, wall = self._clock.now(), self._clock.wall()
        before, self._phases = self._phases, {}
        for tag, record in self._state.models.items():
            for name, rollout in rollouts_of(record).items() if record.rollouts else ():
                known = before.pop((tag, name), ("", 0.0))
                found = phase_began(known, rollout, is_new=False, now=now, wall=wall)
                self._phases[tag, name] = found
        for tag, name in before:
            self._observed.rollouts.forget(rollout_tag(tag, name))

    def _reports(self, backend: BackendRecord) -> dict[ReplicaTag, ModelReport | None]:
        running = [each for each in self._state.running(backend.tag) if each.version == backend.version]
        return {short_tag(each.tag): self._observed.models.get(each.tag) for each in running}

    def _notify(self, record: ModelsRecord, plan: RolloutConfig | None) -> None:
        wanted = target(record, plan)
        for replica in self._state.running(record.backend):
            report = self._observed.models.get(replica.tag)
            if report is not None and not is_met(wanted, report) and replica.tag not in self._busy:
                self._busy.add(replica.tag)
                self._tasks.spawn(self._call(replica, wanted), "models")

    async def _call(self, replica: ReplicaRecord, wanted: Mapping[str, object]) -> None:
        try:
            call = self._cluster.call(
                replica.address(self._cluster.instance), "want_models", wanted=dict(wanted)
            )
            await self._clock.wait_for(call, CALL_S)
        except (ServeError, OSError, TimeoutError) as error:
            logger.info("Replica %s did not receive its list of models: %s", short_tag(replica.tag), error)
        finally:
            self._busy.discard(replica.tag)

    def _read_if_due(self, tag: BackendTag, repository: ModelRepository) -> None:
        now, poll = self._clock.now(), self._polls.get(tag)
        if poll is None or poll.url != repository.url:
            poll = self._polls[tag] = _Poll(repository.url)
        if not poll.is_busy and now >= poll.due:
            poll.due, poll.is_busy = now + repository.poll_period_s, True
            self._tasks.spawn(self._read(tag, repository, poll), "models")

    async def _read(self, tag: BackendTag, repository: ModelRepository, poll: _Poll) -> None:
        known = self._state.models.get(tag)
        reading = partial(read_folder, repository, {} if known is None else known.models, poll.seen)
        problem = ""
        try:
            poll.folder, poll.seen = await self._observed.folders.read(poll.url, reading, self._clock)
        except Exception as error:  # file systems raise errors of many libraries
            problem = f"the model repository cannot be read: {summary_of(error)[:300]}"
        finally:
            poll.is_busy = False
        if self._polls.get(tag) is not poll:
            return  # the backend was deleted or has another repository by now
        if problem:
            self._observed.model_problems[tag] = problem
        else:
            self._observed.model_problems.pop(tag, None)


def read_folder(
    repository: ModelRepository, known: Mapping[str, Mapping[str, object]], before: Mapping[str, str]
) -> tuple[Folder, Mapping[str, str]]:
    """Return the content of a folder, and the files of its new versions, if they are among the newest.

    A new version counts as complete once two consecutive readings agree, because it may still be being
    written.
    """
    versions = list_models(repository.url)
    states = {
        f"{name}/{version}": state_of_version(repository.url, name, version)
        for name, found in versions.items()
        for version in found[-repository.keep_versions :]
        if version not in known.get(name, {})
    }
    whole = frozenset(key for key, state in states.items() if before.get(key) == state)
    return Folder(versions, whole), states
