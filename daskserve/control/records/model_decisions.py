"""Decisions about the models of a deployment, given its folder and the reports of its replicas. Pure.

A version goes from LOADING to READY once all running replicas have it, or to FAILED with the first replica
that cannot load it. The old default version serves until then, and keeps serving after a failure. With a plan
for rollouts, a version that will become the default is ROLLING_OUT between LOADING and READY; see
`daskserve.control.decisions.model_rollouts`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from daskserve.common.copying import replace
from daskserve.control.records.models import ModelReport, ModelsRecord, ModelState
from daskserve.control.records.rollout import RolloutState
from daskserve.errors import NotFoundError
from daskserve.options.rollout import RolloutConfig
from daskserve.payload.model_files import newest_last

#: Number of characters of a reason that are kept.
MAX_REASON = 500


class Folder(NamedTuple):
    """The content of a folder of models.

    Attributes
    ----------
    versions : dict
        By model, the newest last.
    whole : set
        The new versions that are completely written, as ``name/version``.
    """

    versions: Mapping[str, Sequence[str]]
    whole: Collection[str]


def target(record: ModelsRecord, plan: RolloutConfig | None = None) -> dict[str, Any]:
    """Return the models that replicas should have, for `daskserve.data.replica.models.Models.want`."""
    found: dict[str, Any] = {}
    for name, versions in record.models.items():
        wanted = {
            version: each["attempt"]
            for version, each in versions.items()
            if not ModelState(each["state"]).is_given_up
        }
        if wanted:
            found[name] = {"versions": wanted, "default": record.defaults.get(name, "")}
    for name, rollout in rollouts_of(record).items():
        share = 0.0 if plan is None else share_of(rollout, plan)
        if share > 0 and name in found:
            key = key_of(rollout, share)
            found[name]["split"] = {"key": key, "version": rollout.names[0], "share": share}
    return found


def rollouts_of(record: ModelsRecord) -> dict[str, RolloutState]:
    """Return the active rollouts, by model."""
    found = {name: RolloutState.from_plain(each) for name, each in record.rollouts.items()}
    return {name: each for name, each in found.items() if each.is_active}


def share_of(rollout: RolloutState, plan: RolloutConfig) -> float:
    """Return the share of a model's requests that its new version gets."""
    return plan.shares[min(rollout.served, len(plan.steps) - 1)] if rollout.served >= 0 else 0.0


def key_of(rollout: RolloutState, share: float) -> str:
    """Return the key under which the requests of a step are counted."""
    return f"{rollout.rollout_id}/{rollout.served}/{share}"


def at_start(record: ModelsRecord | None) -> dict[str, Any] | None:
    """Return the READY models, which a new replica loads before it serves; None without a record."""
    if record is None:
        return None
    ready = {
        name: {version: each for version, each in versions.items() if each["state"] == ModelState.READY}
        for name, versions in record.models.items()
    }
    return target(replace(record, models=ready))


def is_met(wanted: Mapping[str, Any], report: ModelReport) -> bool:
    """Return whether a replica has loaded, or failed to load, all wanted versions and no others."""
    for name, each in wanted.items():
        for version, attempt in each["versions"].items():
            error = report.errors.get(f"{name}/{version}")
            if not report.has(name, version) and (error is None or error[0] < attempt):
                return False
        default = each["default"]
        if report.has(name, default) and report.defaults.get(name) != default:
            return False
    splits = {name: each["split"]["key"] for name, each in wanted.items() if "split" in each}
    return splits == dict(report.splits) and all(
        version in wanted.get(name, {}).get("versions", ())
        for name, versions in report.loaded.items()
        for version in versions
    )


def loaded(
    record: ModelsRecord,
    name: str,
    version: str,
    *,
    is_next: bool,
    rolls_out: bool = False,
    by: str = "",
) -> ModelsRecord:
    """Return the record with a version to load; a failed version is loaded again.

    ``rolls_out`` says whether a READY version becomes the default by a rollout. ``by`` is the program that
    loads the version; empty if the version was found in the folder.
    """
    known = record.models.get(name, {}).get(version)
    if known is not None and known["state"] == ModelState.ROLLING_OUT:
        return record
    if known is not None and known["state"] == ModelState.READY:
        if not is_next or record.defaults.get(name) == version:
            return record
        if not rolls_out or name not in record.defaults:
            return with_default(record, name, version)
    if known is not None and known["state"] == ModelState.LOADING:
        return changed(record, name, version, {**known, "is_next": is_next})
    number = record.attempts + 1
    entry = {"state": ModelState.LOADING.value, "attempt": number, "reason": "", "is_next": is_next}
    entry |= {"by": by} if by else {}
    return replace(changed(record, name, version, entry), attempts=number)


def unloaded(record: ModelsRecord, name: str, version: str | None) -> ModelsRecord:
    """Return the record without one version or all versions of a model; raise `NotFoundError` if unknown."""
    versions = record.models.get(name, {})
    if not versions or (version is not None and version not in versions):
        raise _unknown(record, name, version)
    kept = {} if version is None else {each: entry for each, entry in versions.items() if each != version}
    models = {**record.models, name: kept}
    rollouts = dict(record.rollouts)
    if not kept:
        del models[name]
        rollouts.pop(name, None)
    defaults = dict(record.defaults)
    if version in (None, defaults.get(name)):
        ready = [each for each, entry in kept.items() if entry["state"] == ModelState.READY]
        defaults.pop(name, None)
        if ready:
            defaults[name] = newest_last(ready)[-1]
    return replace(record, models=models, defaults=defaults, rollouts=rollouts)


def with_default(record: ModelsRecord, name: str, version: str) -> ModelsRecord:
    """Return the record with another default version, which all replicas must have loaded."""
    known = record.models.get(name, {}).get(version)
    if known is not None and known["state"] == ModelState.ROLLING_OUT:
        record = changed(record, name, version, {**known, "state": ModelState.READY.value})
    elif known is None or known["state"] != ModelState.READY:
        raise _unknown(record, name, version)
    return replace(record, defaults={**record.defaults, name: version})


def adopted(record: ModelsRecord, reports: Mapping[str, ModelReport | None]) -> ModelsRecord:
    """Return the first record of a backend, with the models that its replicas loaded when they started."""
    for report in filter(None, reports.values()):
        for name, versions in report.loaded.items():
            for version in versions:
                if version not in record.models.get(name, {}):
                    record = loaded(record, name, version, is_next=report.defaults.get(name) == version)
    return record


def polled(record: ModelsRecord, folder: Folder, keep: int) -> ModelsRecord:
    """Return the record with the newest versions of each model in the folder.

    Versions that are no longer in the folder are removed at once. `settled` removes older versions once the
    newest is READY.
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
    record: ModelsRecord,
    reports: Mapping[str, ModelReport | None],
    keep: int | None,
    *,
    rolls_out: bool = False,
) -> ModelsRecord:
    """Return the record with the states of versions that follow from the reports of running replicas.

    Parameters
    ----------
    reports : dict
        By replica; None if it has not reported yet.
    keep : int or None
        The number of READY versions of a model to keep; None for all.
    rolls_out : bool
        Whether a version becomes the default by a rollout.
    """
    for name, versions in record.models.items():
        for version, entry in versions.items():
            if entry["state"] in (ModelState.LOADING, ModelState.ROLLING_OUT):
                record = _outcome(record, name, version, entry, reports, rolls_out)
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
    rolls_out: bool,
) -> ModelsRecord:
    for tag, report in reports.items():
        error = None if report is None else report.errors.get(f"{name}/{version}")
        if error is not None and error[0] >= entry["attempt"]:
            reason = f"{error[1][:MAX_REASON]} (replica {tag})"
            return changed(
                record, name, version, {**entry, "state": ModelState.FAILED.value, "reason": reason}
            )
    if not reports or not all(
        report is not None and report.has(name, version) for report in reports.values()
    ):
        return record
    if entry["state"] == ModelState.ROLLING_OUT:
        return record
    is_first = name not in record.defaults
    state = ModelState.ROLLING_OUT if rolls_out and entry["is_next"] and not is_first else ModelState.READY
    record = changed(record, name, version, {**entry, "state": state.value})
    if state is ModelState.ROLLING_OUT:
        return record
    return with_default(record, name, version) if entry["is_next"] or is_first else record


def changed(record: ModelsRecord, name: str, version: str, entry: Mapping[str, Any]) -> ModelsRecord:
    """Return the record with a version's entry replaced."""
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
    """Return the status text of the models that load or have failed, and of their folder.

    Of a model's failed versions, it names only the last one that was tried after the default version.
    """
    parts = [problem] if problem else []
    for name, versions in {} if record is None else record.models.items():
        default = record.defaults.get(name) if record is not None else None
        serves = f"; version {default} serves" if default is not None else ""
        tried = versions.get(default or "", {}).get("attempt", 0)
        given_up = ""
        for version, entry in sorted(versions.items(), key=lambda each: each[1]["attempt"]):
            if entry["state"] == ModelState.LOADING:
                parts.append(f"model {name!r} version {version} is being loaded{serves}")
            elif entry["attempt"] < tried:
                continue
            elif entry["state"] == ModelState.FAILED:
                given_up = f"model {name!r} version {version} could not be loaded: {entry['reason']}{serves}"
            elif entry["state"] == ModelState.TAKEN_BACK:
                given_up = f"model {name!r}: {entry['reason']}"
        parts += [given_up] if given_up else []
    return "; ".join(parts)
