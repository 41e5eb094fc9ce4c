"""Decisions about the models of a deployment: what is wanted, and what follows from what replicas have. Pure.

A version goes from LOADING to READY once all running replicas have it, or to FAILED with the first replica
that cannot load it. The old default version serves until then, and for good after a failure. A gate for a new
version belongs between the two, in `settled`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from daskserve.common.copying import replace
from daskserve.control.records.models import ModelReport, ModelsRecord, ModelState
from daskserve.errors import NotFoundError
from daskserve.payload.model_files import newest_last

#: Number of characters of a reason that are kept.
MAX_REASON = 500


class Folder(NamedTuple):
    """What is in a folder of models.

    Attributes
    ----------
    versions : dict
        By model, the newest last.
    whole : set
        The new versions, as ``name/version``, which nobody is writing any more.
    """

    versions: Mapping[str, Sequence[str]]
    whole: Collection[str]


def target(record: ModelsRecord) -> dict[str, Any]:
    """Return what replicas should have, for `daskserve.data.replica.models.Models.want`."""
    found = {}
    for name, versions in record.models.items():
        wanted = {
            version: each["attempt"]
            for version, each in versions.items()
            if each["state"] != ModelState.FAILED
        }
        if wanted:
            found[name] = {"versions": wanted, "default": record.defaults.get(name, "")}
    return found


def at_start(record: ModelsRecord | None) -> dict[str, Any] | None:
    """Return what a replica must have before it serves: what is READY; None if nothing is known yet."""
    if record is None:
        return None
    ready = {
        name: {version: each for version, each in versions.items() if each["state"] == ModelState.READY}
        for name, versions in record.models.items()
    }
    return target(replace(record, models=ready))


def is_met(wanted: Mapping[str, Any], report: ModelReport) -> bool:
    """Return whether a replica has what it should have, or has failed to load it."""
    for name, each in wanted.items():
        for version, attempt in each["versions"].items():
            error = report.errors.get(f"{name}/{version}")
            if not report.has(name, version) and (error is None or error[0] < attempt):
                return False
        default = each["default"]
        if report.has(name, default) and report.defaults.get(name) != default:
            return False
    return all(
        version in wanted.get(name, {}).get("versions", ())
        for name, versions in report.loaded.items()
        for version in versions
    )


def loaded(record: ModelsRecord, name: str, version: str, *, is_next: bool) -> ModelsRecord:
    """Return the record with a version to load; one that failed is tried again."""
    known = record.models.get(name, {}).get(version)
    if known is not None and known["state"] == ModelState.READY:
        return with_default(record, name, version) if is_next else record
    if known is not None and known["state"] == ModelState.LOADING:
        return _changed(record, name, version, {**known, "is_next": is_next})
    number = record.attempts + 1
    entry = {"state": ModelState.LOADING.value, "attempt": number, "reason": "", "is_next": is_next}
    return replace(_changed(record, name, version, entry), attempts=number)


def unloaded(record: ModelsRecord, name: str, version: str | None) -> ModelsRecord:
    """Return the record without a version of a model, or without all; raise `NotFoundError` without any."""
    versions = record.models.get(name, {})
    if not versions or (version is not None and version not in versions):
        raise _unknown(record, name, version)
    kept = {} if version is None else {each: entry for each, entry in versions.items() if each != version}
    models = {**record.models, name: kept}
    if not kept:
        del models[name]
    defaults = dict(record.defaults)
    if version in (None, defaults.get(name)):
        ready = [each for each, entry in kept.items() if entry["state"] == ModelState.READY]
        defaults.pop(name, None)
        if ready:
            defaults[name] = newest_last(ready)[-1]
    return replace(record, models=models, defaults=defaults)


def with_default(record: ModelsRecord, name: str, version: str) -> ModelsRecord:
    """Return the record with another default version; raise `NotFoundError` unless that is READY."""
    known = record.models.get(name, {}).get(version)
    if known is None or known["state"] != ModelState.READY:
        raise _unknown(record, name, version)
    return replace(record, defaults={**record.defaults, name: version})


def adopted(record: ModelsRecord, reports: Mapping[str, ModelReport | None]) -> ModelsRecord:
    """Return a new record with what replicas have loaded in their starts, when none was known."""
    for report in filter(None, reports.values()):
        for name, versions in report.loaded.items():
            for version in versions:
                if version not in record.models.get(name, {}):
                    record = loaded(record, name, version, is_next=report.defaults.get(name) == version)
    return record


def polled(record: ModelsRecord, folder: Folder, keep: int) -> ModelsRecord:
    """Return the record that follows from the folder: the newest versions of each model are wanted.

    Older ones go once the newest is READY, see `settled`, and what is no longer in the folder goes at once.
    """
    for name, versions in record.models.items():
        for version in versions:
            if version not in folder.versions.get(name, ()):
                record = unloaded(record, name, version)
    for name, found in folder.versions.items():
        for version in found[-keep:]:
            if version not in record.models.get(name, {}) and f"{name}/{version}" in folder.whole:
                record = loaded(record, name, version, is_next=version == found[-1])
    return record


def settled(
    record: ModelsRecord, reports: Mapping[str, ModelReport | None], keep: int | None
) -> ModelsRecord:
    """Return the record that follows from what the running replicas have.

    Parameters
    ----------
    reports : dict
        By replica; None if it has not reported yet.
    keep : int or None
        How many versions of a model stay; None: all.
    """
    for name, versions in record.models.items():
        for version, entry in versions.items():
            if entry["state"] == ModelState.LOADING:
                record = _outcome(record, name, version, entry, reports)
    if keep is None:
        return record
    for name, versions in record.models.items():
        ready = newest_last(each for each, entry in versions.items() if entry["state"] == ModelState.READY)
        for version in ready[:-keep]:
            if version != record.defaults.get(name):
                record = unloaded(record, name, version)
    return record


def _outcome(
    record: ModelsRecord,
    name: str,
    version: str,
    entry: Mapping[str, Any],
    reports: Mapping[str, ModelReport | None],
) -> ModelsRecord:
    for tag, report in reports.items():
        error = None if report is None else report.errors.get(f"{name}/{version}")
        if error is not None and error[0] >= entry["attempt"]:
            reason = f"{error[1][:MAX_REASON]} (replica {tag})"
            return _changed(
                record, name, version, {**entry, "state": ModelState.FAILED.value, "reason": reason}
            )
    if not reports or not all(
        report is not None and report.has(name, version) for report in reports.values()
    ):
        return record
    record = _changed(record, name, version, {**entry, "state": ModelState.READY.value})
    is_first = name not in record.defaults
    return with_default(record, name, version) if entry["is_next"] or is_first else record


def _changed(record: ModelsRecord, name: str, version: str, entry: Mapping[str, Any]) -> ModelsRecord:
    versions = {**record.models.get(name, {}), version: entry}
    return replace(record, models={**record.models, name: versions})


def _unknown(record: ModelsRecord, name: str, version: str | None) -> NotFoundError:
    known = ", ".join(_named(record)) or "none"
    what = f"Model {name!r}" if version is None else f"Version {version!r} of model {name!r}"
    return NotFoundError(f"{what} is not loaded; there are: {known}.")


def _named(record: ModelsRecord) -> Iterable[str]:
    for name, versions in record.models.items():
        for version, entry in versions.items():
            yield f"{name}/{version} ({entry['state']})"


def text_of(record: ModelsRecord | None, problem: str = "") -> str:
    """Return what the status says of the models: those that load or have failed, and of their folder."""
    parts = [problem] if problem else []
    for name, versions in {} if record is None else record.models.items():
        default = record.defaults.get(name) if record is not None else None
        for version, entry in versions.items():
            serves = f"; version {default} serves" if default is not None else ""
            if entry["state"] == ModelState.FAILED:
                parts.append(
                    f"model {name!r} version {version} could not be loaded: {entry['reason']}{serves}"
                )
            elif entry["state"] == ModelState.LOADING:
                parts.append(f"model {name!r} version {version} is being loaded{serves}")
    return "; ".join(parts)
