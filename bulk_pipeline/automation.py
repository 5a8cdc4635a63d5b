"""Partition keys, and what runs by itself: the sync step, the jobs, the sensor and the schedule.

The sensor takes what is new in the source; the schedule takes whatever is missing or stale.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import dagster as dg

from bulk_pipeline.assets import ALL, asset_key, asset_keys, open_store, partitions_definition
from bulk_pipeline.spec import BulkInferenceSpec, FilesSource
from bulk_pipeline.storage.schemas import RAW_DATASET
from bulk_pipeline.storage.store import Store
from bulk_pipeline.wording import counted

SYNC_TAG = "bulk_pipeline/sync_partitions"  # marks the jobs that `partitions sync` runs
STATUS_TAG = "bulk_pipeline/partitions_status"  # marks those that `partitions status` runs
SEEN_FILE = "source_seen.json"  # the files' versions at the sensor's last look
RANGE_TAGS = ("dagster/asset_partition_range_start", "dagster/asset_partition_range_end")
UNFINISHED = (
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
)
MAX_SHOWN = 20  # names in a log line


def sync_partitions(
    instance: dg.DagsterInstance, spec: BulkInferenceSpec
) -> tuple[list[str], list[str]]:
    """Register the source's partitions with Dagster.

    Returns
    -------
    new
        The keys that were registered, sorted.
    gone
        Registered keys whose source is gone, in Dagster's order. They stay registered, since
        their results are still there, until `forget_partitions`.
    """
    from bulk_pipeline.stages.partitions import plan_partitions

    plan = plan_partitions(spec, open_store(spec))
    new = _register(instance, spec, plan)
    return new, [key for key in _registered(instance, spec) if key not in plan]


def forget_partitions(
    instance: dg.DagsterInstance, spec: BulkInferenceSpec, keys: Sequence[str]
) -> None:
    """Drop partitions whose source is gone from those that Dagster knows; nothing else changes.

    Raises
    ------
    ValueError
        If Dagster does not know one of the keys, or its source is still there.
    """
    from bulk_pipeline.stages.partitions import NoFilesError, plan_partitions

    definition = partitions_definition(spec)
    if not isinstance(definition, dg.DynamicPartitionsDefinition):
        raise ValueError("partitions.by is none, so its one partition cannot be forgotten")
    registered = _registered(instance, spec)
    if unknown := [key for key in keys if key not in registered]:
        raise ValueError(
            f"Dagster knows no partition {listed(unknown)}; there are {listed(registered)}"
        )
    try:
        plan = plan_partitions(spec, open_store(spec))
    except NoFilesError:  # all of it is gone
        plan = {}
    if present := [key for key in keys if key in plan]:
        raise ValueError(
            f"{listed(present)} is still in the source, so the next sync would register it again; "
            "remove its files first"
        )
    assert definition.name is not None
    for key in keys:
        instance.delete_dynamic_partition(definition.name, key)


def _register(
    instance: dg.DagsterInstance, spec: BulkInferenceSpec, keys: Iterable[str]
) -> list[str]:
    definition = partitions_definition(spec)
    new = sorted(set(keys) - set(_registered(instance, spec)))
    if new and isinstance(definition, dg.DynamicPartitionsDefinition):
        assert definition.name is not None
        instance.add_dynamic_partitions(definition.name, new)
    return new


def _registered(instance: dg.DagsterInstance, spec: BulkInferenceSpec) -> Sequence[str]:
    """The keys that Dagster knows, in its order: that of registration."""
    definition = partitions_definition(spec)
    return definition.get_partition_keys(dynamic_partitions_store=instance)


def contiguous_ranges(
    keys: Iterable[str], order: Sequence[str], max_size: int | None = None
) -> list[list[str]]:
    """Cut `keys` into runs of neighbours in `order`, of at most `max_size`."""
    wanted = set(keys)
    ranges: list[list[str]] = []
    is_open = False
    for key in order:
        if key not in wanted:
            is_open = False
            continue
        if not is_open or (max_size and len(ranges[-1]) >= max_size):
            ranges.append([])
        ranges[-1].append(key)
        is_open = True
    return ranges


def build_run_requests(
    spec: BulkInferenceSpec,
    keys: Iterable[str],
    order: Sequence[str],
    suffix: str = "",
    asset_selection: Sequence[dg.AssetKey] | None = None,
) -> list[dg.RunRequest]:
    """Ask for a run over each contiguous range of the keys.

    Parameters
    ----------
    order
        All registered keys, in Dagster's order: a range is meant in it.
    suffix
        Ends the run keys; Dagster launches each run key once.
    """
    requests = []
    for range_ in contiguous_ranges(keys, order, spec.partitions.max_per_run):
        is_static = spec.partitions.by == "none"
        requests.append(
            dg.RunRequest(
                run_key=f"{range_[0]}...{range_[-1]}:{len(range_)}{suffix}",
                partition_key=ALL if is_static else None,
                tags={}
                if is_static
                else dict(zip(RANGE_TAGS, (range_[0], range_[-1]), strict=True)),
                asset_selection=asset_selection,
            )
        )
    return requests


def build_jobs(spec: BulkInferenceSpec, resource_key: str) -> tuple[list[dg.JobDefinition], Any]:
    """The jobs that register partitions and tell their state, and the one that runs all assets."""

    @dg.op(name=f"{spec.name}_find_partitions")
    def find_partitions(context: dg.OpExecutionContext) -> list[str]:
        new, _ = sync_partitions(context.instance, spec)
        context.log.info(f"{counted(len(new), 'new partition')}: {listed(new)}")
        return new

    @dg.job(
        name=f"{spec.name}_sync_partitions",
        description="Register the source's partitions with Dagster.",
        tags={SYNC_TAG: spec.name},
        executor_def=dg.in_process_executor,
    )
    def sync_job() -> None:
        find_partitions()

    @dg.op(name=f"{spec.name}_judge_partitions", required_resource_keys={resource_key})
    def judge_partitions(context: dg.OpExecutionContext) -> dict[str, Any]:
        from bulk_pipeline.stages.partitions import plan_partitions
        from bulk_pipeline.stages.staleness import find_missing_or_stale, find_removed

        store = open_store(spec)
        plan = plan_partitions(spec, store)
        model = getattr(context.resources, resource_key)
        reasons = find_missing_or_stale(spec, store, model, plan)
        for key, reason in reasons.items():
            context.log.info(f"partition {key}: {reason}")
        return {"keys": list(plan), "reasons": reasons, "removed": find_removed(store, plan)}

    @dg.job(
        name=f"{spec.name}_partitions_status",
        description="Tell which partitions are missing or stale, and why. Changes nothing.",
        tags={STATUS_TAG: spec.name},
        executor_def=dg.in_process_executor,
    )
    def status_job() -> None:
        judge_partitions()

    assets_job = dg.define_asset_job(
        f"{spec.name}_job",
        selection=dg.AssetSelection.assets(*asset_keys(spec)),
        description="Run the dataset's four assets over the chosen partitions.",
    )
    return [sync_job, status_job], assets_job


@dataclass(frozen=True, slots=True)
class SourceNews:
    """What a look at the source found.

    Attributes
    ----------
    new
        Keys that Dagster does not know yet, sorted; their files are fully written.
    changed
        Why a finished partition is stale, by key.
    removed
        Files that are gone.
    unsettled
        Files that may still be being written; they wait for the next look.
    cursor
        To be given to the next look.
    """

    cursor: str
    new: list[str] = field(default_factory=list)
    changed: dict[str, str] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    unsettled: list[str] = field(default_factory=list)


def look_at_source(
    spec: BulkInferenceSpec,
    store: Store,
    registered: Iterable[str],
    cursor: str | None = None,
    now: float | None = None,
) -> SourceNews:
    """Compare the source with what was there at the last look.

    One listing, and nothing else where nothing has changed.
    """
    from bulk_pipeline.stages.partitions import find_recent, list_files, plan_partitions

    before = json.loads(cursor) if cursor else {}
    files = list_files(spec.source) if isinstance(spec.source, FilesSource) else []
    versions = {file.relative: file.version for file in files}
    recent = find_recent(files, spec.automation.settle_seconds, now)
    unsettled = {
        name for name, version in recent.items() if before.get("recent", {}).get(name) != version
    }
    listing = hashlib.blake2b(json.dumps(versions).encode(), digest_size=16).hexdigest()
    after = json.dumps({"listing": listing, "recent": recent, "unsettled": bool(unsettled)})
    is_same = before.get("listing") == listing and not before.get("unsettled")
    waits = spec.partitions.by == "rows" and unsettled  # counting rows would read half a file
    if (files and is_same and not unsettled) or waits:
        return SourceNews(after, unsettled=sorted(unsettled))
    plan = plan_partitions(spec, store, files)
    settled = {
        key: slice_
        for key, slice_ in plan.items()
        if not any(file.relative in unsettled for file in slice_.files)
    }
    new = sorted(set(settled) - set(registered))
    seen = store.read_json(SEEN_FILE) or {}
    touched = {
        key: slice_
        for key, slice_ in settled.items()
        if any(seen.get(file.relative) != file.version for file in slice_.files)
        or seen.keys() - versions.keys()
    }
    now_seen = {
        name: seen.get(name, "") if name in unsettled else version
        for name, version in versions.items()
    }
    changed = _find_changed(spec, store, touched)
    if now_seen != seen:
        store.write_json(SEEN_FILE, now_seen)
    return SourceNews(
        cursor=after,
        new=new,
        changed=changed,
        removed=sorted(seen.keys() - versions.keys()),
        unsettled=sorted(unsettled),
    )


def _find_changed(spec: BulkInferenceSpec, store: Store, plan: dict[str, Any]) -> dict[str, str]:
    from bulk_pipeline.stages.staleness import SOURCE_CHANGED, find_missing_or_stale

    reasons = find_missing_or_stale(spec, store, plan=plan) if plan else {}
    return {key: reason for key, reason in reasons.items() if reason.startswith(SOURCE_CHANGED)}


def build_sensor(spec: BulkInferenceSpec, job: Any) -> dg.SensorDefinition:
    """A sensor that registers new partitions, asks for a run over them, and reports changes."""
    runs_new = spec.automation.mode == "sensor"

    @dg.sensor(
        name=f"{spec.name}_new_partitions",
        job=job,
        minimum_interval_seconds=spec.automation.sensor_seconds,
        description="Registers partitions that are new in the source"
        + (" and runs them." if runs_new else "; automation conditions run them."),
    )
    def new_partitions(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        from bulk_pipeline.stages.partitions import NoFilesError

        definition = partitions_definition(spec)
        is_dynamic = isinstance(definition, dg.DynamicPartitionsDefinition)
        order = list(_registered(context.instance, spec)) if is_dynamic or context.cursor else []
        try:
            news = look_at_source(spec, open_store(spec), order, context.cursor)
        except NoFilesError as error:
            return dg.SkipReason(str(error))
        report = _report(news, spec.automation.cron is not None)
        for line in report:
            context.log.info(line)
        requests = []
        if runs_new:
            requests = build_run_requests(spec, news.new, [*order, *news.new])
        elif news.changed:  # the conditions see what is newer upstream, but not the source itself
            suffix = "@" + json.loads(news.cursor)["listing"]
            selection = [asset_key(spec, RAW_DATASET)]
            requests = build_run_requests(spec, news.changed, order, suffix, selection)
        return dg.SensorResult(
            run_requests=requests,
            skip_reason=None if requests else "; ".join(report) or "nothing new in the source",
            cursor=news.cursor,
            dynamic_partitions_requests=(
                [definition.build_add_request(news.new)]
                if news.new and isinstance(definition, dg.DynamicPartitionsDefinition)
                else []
            ),
            asset_events=[
                dg.AssetObservation(
                    asset_key(spec, RAW_DATASET), partition=key, metadata={"stale": reason}
                )
                for key, reason in news.changed.items()
            ],
        )

    return new_partitions


def _report(news: SourceNews, has_schedule: bool) -> list[str]:
    """What a look at the source found, a line each."""
    lines = []
    if news.new:
        lines.append(f"{counted(len(news.new), 'new partition')}: {listed(news.new)}")
    if news.changed:
        remedy = "the schedule runs them" if has_schedule else "materialise them"
        changed = listed(f"{key} ({reason})" for key, reason in news.changed.items())
        lines.append(f"{counted(len(news.changed), 'stale partition')}, {remedy}: {changed}")
    if news.removed:
        lines.append(f"{len(news.removed)} files are gone, results stay: {listed(news.removed)}")
    if news.unsettled:
        waiting = listed(news.unsettled)
        lines.append(f"{len(news.unsettled)} files may still be being written: {waiting}")
    return lines


def build_schedule(spec: BulkInferenceSpec, job: Any, resource_key: str) -> dg.ScheduleDefinition:
    """A schedule that runs what is missing or stale, a run for each contiguous range.

    Raises
    ------
    ValueError
        If `automation.cron` or `automation.timezone` is not valid.
    """
    assert spec.automation.cron is not None
    try:
        return _schedule(spec, job, resource_key)
    except dg.DagsterInvalidDefinitionError as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"automation.cron must be a cron line in the zone automation.timezone, got "
            f"{spec.automation.cron!r} in {spec.automation.timezone!r} ({reason}); correct it"
        ) from None


def _schedule(spec: BulkInferenceSpec, job: Any, resource_key: str) -> dg.ScheduleDefinition:
    assert spec.automation.cron is not None

    @dg.schedule(
        name=f"{spec.name}_missing_or_stale",
        job=job,
        cron_schedule=spec.automation.cron,
        execution_timezone=spec.automation.timezone,
        default_status=dg.DefaultScheduleStatus.RUNNING,
        required_resource_keys={resource_key},
        description="Runs the partitions that are missing or stale.",
    )
    def missing_or_stale(
        context: dg.ScheduleEvaluationContext,
    ) -> list[dg.RunRequest] | dg.SkipReason:
        from bulk_pipeline.stages.partitions import NoFilesError

        if run_ids := _unfinished_runs(context.instance, spec):
            return dg.SkipReason(f"runs of {spec.name} are not finished: {listed(run_ids)}")
        model = getattr(context.resources, resource_key)
        try:
            reasons = _find_due(context.instance, spec, model)
        except NoFilesError as error:
            return dg.SkipReason(str(error))
        for key, reason in reasons.items():
            context.log.info(f"partition {key}: {reason}")
        if not reasons:
            return dg.SkipReason("nothing is missing or stale")
        order = _registered(context.instance, spec)
        return build_run_requests(spec, reasons, order, f"@{context.scheduled_execution_time}")

    return missing_or_stale


def _find_due(instance: dg.DagsterInstance, spec: BulkInferenceSpec, model: Any) -> dict[str, str]:
    """What is missing or stale and fully written; new keys are registered."""
    from bulk_pipeline.stages.partitions import find_recent, list_files, plan_partitions
    from bulk_pipeline.stages.staleness import find_missing_or_stale

    store = open_store(spec)
    files = list_files(spec.source) if isinstance(spec.source, FilesSource) else []
    recent = find_recent(files, spec.automation.settle_seconds)
    if recent and spec.partitions.by == "rows":  # counting rows would read half a file
        return {}
    plan = {
        key: slice_
        for key, slice_ in plan_partitions(spec, store, files).items()
        if not any(file.relative in recent for file in slice_.files)
    }
    _register(instance, spec, plan)
    return find_missing_or_stale(spec, store, model, plan)


def _unfinished_runs(instance: dg.DagsterInstance, spec: BulkInferenceSpec) -> list[str]:
    runs = instance.get_runs(filters=dg.RunsFilter(statuses=list(UNFINISHED)))
    return [
        run.run_id
        for run in runs
        if run.job_name == f"{spec.name}_job"
        or any(key.path[0] == spec.name for key in run.asset_selection or ())
    ]


def listed(names: Iterable[str]) -> str:
    """The first names, for a line of a log."""
    names = list(names)
    return ", ".join(names[:MAX_SHOWN]) + (", ..." if len(names) > MAX_SHOWN else "") or "none"
