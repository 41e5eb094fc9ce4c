"""Back up, restore and check the stores of instances: ``from daskserve import stores``.

Each function takes the URL that ``serve.start(store=...)`` takes, and blocks. Paths are those of this
machine, so a store on a disk is backed up where its scheduler runs. The command ``daskserve store`` has the
same functions; docs/backups.md says when to use which.
"""

from __future__ import annotations

import pickletools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from daskserve.cluster.store import archive
from daskserve.cluster.store.archive import StoreContents, StoredInstance
from daskserve.cluster.store.errors import StoreIncompleteError
from daskserve.common.formatting import capitalized
from daskserve.common.types import InstanceName, described
from daskserve.control.records.records import AppRecord, BackendRecord, Change, CodeRecord
from daskserve.control.records.storing import checkpoint
from daskserve.control.records.versions import unmarked
from daskserve.errors import AlreadyRunningError, NotFoundError
from daskserve.payload.parcels import Parcel

__all__ = ["InstanceReport", "StoreReport", "backup", "check", "repair", "restore"]

#: The remedy for a damaged record, by kind.
REMEDIES: Mapping[str, str] = {
    "app": "Deploy the application again.",
    "backend": "Deploy it again.",
    "endpoint": "Deploy it again.",
    "code": "Deploy it again.",
    "parcel": "Deploy it again.",
    "capacity": "Set the target capacity again.",
    "goal": "Nothing has to be done: the record only says how a change ended.",
    "replica": "Nothing is to be done: the next start replaces the replica.",
    "proxy": "Nothing is to be done: the next start replaces the proxy.",
}
_OTHERWISE = "Restore a backup, or deploy the missing parts again."


@dataclass(slots=True)
class InstanceReport:
    """The records of an instance.

    Attributes
    ----------
    epoch : int
        How many controllers it has had.
    records : dict
        The number of records of each kind.
    applications : list of str
        The names of its applications.
    deployments : dict
        The version of each deployment and backend, by name.
    problems : dict
        The damaged records by name, with the reason and the remedy.
    """

    epoch: int
    records: dict[str, int] = field(default_factory=dict)
    applications: list[str] = field(default_factory=list)
    deployments: dict[str, str] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class StoreReport:
    """The contents of a store or a backup, by the name of the instance.

    ``lack`` describes missing parts of the whole store, with the remedy; empty if nothing is missing.
    """

    place: str
    instances: dict[InstanceName, InstanceReport]
    lack: str = ""

    @property
    def is_sound(self) -> bool:
        """Whether nothing is damaged or missing."""
        return not self.lack and not any(each.problems for each in self.instances.values())

    def __str__(self) -> str:
        lines = [f"{self.place}: {'sound' if self.is_sound else 'DAMAGED'}"]
        if self.lack:
            lines.append(f"  {self.lack}")
        for name, each in self.instances.items():
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(each.records.items()))
            lines.append(f"instance {name!r}, epoch {each.epoch}: {kinds or 'no records'}")
            lines += [f"  application {app!r}" for app in each.applications]
            lines += [f"  {tag} version {version}" for tag, version in each.deployments.items()]
            lines += [f"  DAMAGED {key}: {text}" for key, text in each.problems.items()]
        return "\n".join(lines)


def check(place: str | Path) -> StoreReport:
    """Return the contents of a store or a backup, with damaged and missing records. Changes nothing.

    A store may be in use. No user code is run: code is only checked to be complete.

    Parameters
    ----------
    place : str or Path
        The URL of a store, or the path of a backup.

    Raises
    ------
    StoreError There is no store or backup, or it cannot be read at all.
    """
    return _report(place, _read(place))


def backup(url: str, path: str | Path, *, instances: Iterable[InstanceName] | None = None) -> StoreReport:
    """Write the contents of a store to a file, even while the store is in use, and return them.

    The file is written whole or not at all, and only its user may access it. Damaged records are left out;
    the report lists them.

    Raises
    ------
    NotFoundError
        The store has no such instance.
    StoreError
        The store cannot be read, lacks records, or the file cannot be written.
    """
    found = _read(url)
    if found.lack:
        raise StoreIncompleteError(f"The store is incomplete, and was not backed up: {_lack(found)}")
    found = StoreContents(_chosen(url, found, instances))
    archive.write_backup(Path(path), found.instances)
    return _report(url, found)


def restore(
    path: str | Path, url: str, *, instances: Iterable[InstanceName] | None = None, force: bool = False
) -> StoreReport:
    """Replace the records in a store by those of the instances in a backup, and return the new records.

    The store may be of another kind than the original. Other instances in it stay unchanged. Each instance is
    replaced whole or not at all, even if the process is killed.

    Parameters
    ----------
    force
        Whether to do so even if a process uses the store. An instance that runs there is fenced: it
        keeps serving, and must be restarted to use the restored records.

    Raises
    ------
    AlreadyRunningError
        A process uses the store, or may do so.
    NotFoundError
        The backup has no such instance.
    StoreError
        The backup is damaged, or the store cannot be written.
    """
    found = archive.read_backup(Path(path))
    chosen = _chosen(str(path), found, instances)
    if not force and archive.exists(url) and (user := archive.user_at(url, list(chosen))):
        raise AlreadyRunningError(
            f"The store {url} is in use by {user}. End the instance first (daskserve shutdown, and stop its "
            "scheduler); or pass force=..., and restart the instance afterwards."
        )
    may_lack = _covers(url, chosen)
    for name, each in chosen.items():
        _put(url, name, each, may_lack=may_lack)
    return _report(url, StoreContents(chosen))


def repair(url: str) -> list[str]:
    """Accept a store as complete, and return the records that are lost permanently.

    Damaged records stay set aside. Call this only if there is no backup, after copying all files of the
    store.

    Raises
    ------
    AlreadyRunningError
        A process uses the store, or may do so.
    StoreError
        It cannot be read at all.
    """
    found = _read(url)
    if user := archive.user_at(url, list(found.instances)):
        raise AlreadyRunningError(f"The store {url} is in use by {user}. End that first.")
    missing = []
    for name in found.instances or ["default"]:
        store = archive.blocking_store(url, name)
        try:
            missing.append(store.repair())
        finally:
            store.close()
    return [each for each in missing if each]


# ---- private


def _read(place: str | Path) -> StoreContents:
    if "://" in str(place):
        return archive.read_store(str(place))
    return archive.read_backup(Path(place))


def _chosen(
    place: str, found: StoreContents, names: Iterable[InstanceName] | None
) -> dict[InstanceName, StoredInstance]:
    if names is None:
        return found.instances
    wanted = list(names)
    for name in wanted:
        if name not in found.instances:
            known = ", ".join(map(repr, found.instances)) or "none"
            raise NotFoundError(f"There is no instance {name!r} in {place}; there are: {known}.")
    return {name: found.instances[name] for name in wanted}


def _covers(url: str, chosen: Mapping[InstanceName, StoredInstance]) -> bool:
    """Return whether some instances are all instances in a store."""
    return not archive.exists(url) or set(archive.read_store(url).instances) <= set(chosen)


def _put(url: str, name: InstanceName, given: StoredInstance, *, may_lack: bool) -> None:
    store = archive.blocking_store(url, name)
    try:
        if may_lack:
            store.repair()
        else:
            store.open()
        # An epoch never decreases, because the actors of a running cluster refuse older controllers.
        epoch = max(store.claim_epoch(), given.epoch)
        store.rewrite(epoch, given.records)
    finally:
        store.close()


def _report(place: str | Path, found: StoreContents) -> StoreReport:
    instances = {name: _report_of(each) for name, each in sorted(found.instances.items())}
    return StoreReport(str(place), instances, _lack(found))


def _lack(found: StoreContents) -> str:
    remedy = (
        "Copy all files of the store, restore a backup, or continue with the remaining records: daskserve "
        "store repair."
    )
    return f"{capitalized(found.lack)}. {remedy}" if found.lack else ""


def _report_of(stored: StoredInstance) -> InstanceReport:
    change, corrupt = checkpoint.read({k: each for k, each in stored.records.items() if _kind(k) != "parcel"})
    problems = {**stored.problems, **{key: f"{error}." for key, error in corrupt.items()}}
    problems.update(_broken_codes(change, stored.records, problems))
    backends = [each for each in change.values() if isinstance(each, BackendRecord)]
    return InstanceReport(
        stored.epoch,
        dict(Counter(map(_kind, stored.records))),
        sorted(each.name for each in change.values() if isinstance(each, AppRecord)),
        {each.tag: each.user_version or unmarked(each.version) for each in backends},
        {key: f"{text} {REMEDIES.get(_kind(key), _OTHERWISE)}" for key, text in sorted(problems.items())},
    )


def _broken_codes(change: Change, records: Mapping[str, bytes], known: Mapping[str, str]) -> dict[str, str]:
    """Return the codes that cannot be loaded, with reasons that can be found without running them."""
    found = {}
    for each in change.values():
        if isinstance(each, BackendRecord) and not each.is_deleting:
            key = f"code/{each.code_key}"
            if key not in change and key not in known:
                found[key] = f"The code of {each.display_name} is missing."
        elif isinstance(each, CodeRecord) and (why := _fault_of(each, records)):
            found[each.key] = f"The code of {_described(change, each.backend)} {why}."
    return found


def _described(change: Change, tag: str) -> str:
    backend = change.get(f"backend/{tag}")
    return backend.display_name if isinstance(backend, BackendRecord) else described(tag)


def _fault_of(code: CodeRecord, records: Mapping[str, bytes]) -> str:
    try:
        parcel = Parcel.labelled(code.code)
        if parcel is None:
            return _fault_of_pickle(code.code)
        return _fault_of_parcel(parcel, _pieces(code.name, records))
    except Exception as error:
        # Damaged bytes may raise any error.
        return f"cannot be read ({error!r})"


def _pieces(name: str, records: Mapping[str, bytes]) -> Sequence[bytes]:
    pieces: list[bytes] = []
    while (piece := records.get(f"parcel/{name}/{len(pieces)}")) is not None:
        pieces.append(piece)
    return pieces


def _fault_of_parcel(parcel: Parcel, pieces: Sequence[bytes]) -> str:
    content = memoryview(b"".join(pieces))
    if len(content) != parcel.size_bytes:
        return f"has {len(content)} of {parcel.size_bytes} bytes of its constructor arguments"
    parts = parcel.split(content)
    if content[: len(parcel.head)] != parcel.head or Parcel.of(parts).digest != parcel.digest:
        return "has different constructor arguments from those of its deploy (the digest differs)"
    return _fault_of_pickle(bytes(parts[0]))


def _fault_of_pickle(data: bytes) -> str:
    names = [code.name for code, _, _ in pickletools.genops(data)]
    return "" if names[-1:] == ["STOP"] else "is cut off"


def _kind(key: str) -> str:
    return key.partition("/")[0]
