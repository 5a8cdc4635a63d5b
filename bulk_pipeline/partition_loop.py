"""One step over several partitions: a bad one is named and does not stop the good ones.

Dagster skips what comes after a failed step, for the good partitions too. So a step with some bad
partitions succeeds as long as a later step of the run is there to raise in its place: it records
the bad ones, which the later steps leave out, and the last step fails the run and names them.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import dagster as dg

# Output metadata that keeps Dagster from recording the step's whole range as materialised. It has
# no public way to leave out some of the partitions of a run.
from dagster._core.definitions.source_asset import (
    SYSTEM_METADATA_KEY_SOURCE_ASSET_OBSERVATION as NO_EVENTS,
)

from bulk_pipeline.checks import run_checks
from bulk_pipeline.gpu_pool import GPU_POOL, release_dead_runs
from bulk_pipeline.spec import BulkInferenceSpec
from bulk_pipeline.stages.stage_report import StageReport
from bulk_pipeline.storage.schemas import COMPLETIONS, OUTPUT, PROMPTS, RAW_DATASET
from bulk_pipeline.storage.store import Store

FAILED = "bulk_pipeline/failed"  # metadata of the observation that records a bad partition
NEXT = {
    RAW_DATASET: (PROMPTS, OUTPUT),
    PROMPTS: (COMPLETIONS,),
    COMPLETIONS: (OUTPUT,),
    OUTPUT: (),
}

Work = Callable[[str], StageReport]


@dataclass(slots=True)
class Outcome:
    """The partitions of a step: those done, and why the others failed, here or earlier."""

    done: list[str] = field(default_factory=list)
    failed_here: dict[str, str] = field(default_factory=dict)
    failed_before: dict[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> dict[str, str]:
        """All that failed in this run up to this step."""
        return self.failed_before | self.failed_here


def run_partitions(
    context: dg.AssetExecutionContext,
    spec: BulkInferenceSpec,
    store: Store,
    table: str,
    work: Work,
    extra: Callable[[str], dict[str, Any]] = lambda key: {},
    metadata: Callable[[], dict[str, Any]] = dict,
) -> dg.MaterializeResult:
    """Run `work` on every partition of the run that has not failed in it; the step's result.

    A finished partition is recorded at once, so that it stays materialised whatever happens to
    the rest of the run; the event at the end of the step repeats it.

    Parameters
    ----------
    extra
        Further metadata of a partition.
    metadata
        Metadata of the whole step, called at its end.

    Raises
    ------
    Failure
        If partitions failed and no later step of the run will say so, or none is left to go on.
    """
    keys = sorted(context.partition_keys)
    if not keys:
        raise dg.Failure(
            f"no partition of {store.dataset} is in the range asked for; name its ends in the "
            f"order of registration",
            allow_retries=False,
        )
    warn_of_dead_runs(context)
    outcome = _work_on(context, spec, store, table, keys, work, extra)
    results = run_checks(spec, store, table, [*outcome.done, *outcome.failed_here])
    if not outcome.failed:
        return dg.MaterializeResult(metadata=metadata(), check_results=results)
    if outcome.done and any(_is_in_run(context, spec, later) for later in NEXT[table]):
        return dg.MaterializeResult(metadata={NO_EVENTS: True}, check_results=results)
    for result in results:
        _log_check(context, result)
    reasons = "; ".join(f"{key}: {reason}" for key, reason in sorted(outcome.failed.items()))
    raise dg.Failure(
        f"{len(outcome.failed)} of {len(keys)} partitions failed: {reasons}", allow_retries=False
    )


def _work_on(
    context: dg.AssetExecutionContext,
    spec: BulkInferenceSpec,
    store: Store,
    table: str,
    keys: Sequence[str],
    work: Work,
    extra: Callable[[str], dict[str, Any]],
) -> Outcome:
    import polars as pl

    failed_before = failed_earlier_in_run(context, spec)
    outcome = Outcome(
        failed_before={key: failed_before[key] for key in keys if key in failed_before}
    )
    for key in keys:
        if key in failed_before:
            context.log.warning(f"partition {key}: left out, it failed in {failed_before[key]}")
            continue
        started = time.monotonic()
        try:
            report = work(key)
        # A polars panic is a BaseException, but an error and not an interrupt.
        except (Exception, pl.exceptions.PanicException) as error:
            context.log.error(f"partition {key}: {error}", exc_info=sys.exc_info())
            outcome.failed_here[key] = f"{table}: {error}"
            context.log_event(
                dg.AssetObservation(
                    context.asset_key, partition=key, metadata={FAILED: outcome.failed_here[key]}
                )
            )
            continue
        seconds = time.monotonic() - started
        context.log.info(f"partition {key}: {report.rows} rows in {seconds:.1f} s")
        metadata = _metadata(store, table, report) | extra(key)
        metadata = {
            name: _shown(name, value) for name, value in metadata.items() if value not in ([], {})
        }
        context.add_asset_metadata(metadata, partition_key=key)
        context.log_event(
            dg.AssetMaterialization(context.asset_key, metadata=metadata, partition=key)
        )
        outcome.done.append(key)
    return outcome


def warn_of_dead_runs(context: dg.AssetExecutionContext | dg.OpExecutionContext) -> None:
    """Free the places that dead runs hold in the pool, and say so in the run's log."""
    for run_id in release_dead_runs(context.instance):
        context.log.warning(f"run {run_id} is dead; its place in the pool {GPU_POOL} is free again")


def failed_earlier_in_run(
    context: dg.AssetExecutionContext | dg.OpExecutionContext, spec: BulkInferenceSpec
) -> dict[str, str]:
    """The partitions that earlier steps of this run recorded as failed, and why."""
    failed: dict[str, str] = {}
    cursor, has_more = None, True
    while has_more:
        page = context.instance.get_records_for_run(
            context.run.run_id, cursor, dg.DagsterEventType.ASSET_OBSERVATION
        )
        for record in page.records:
            event = record.event_log_entry.dagster_event
            observation = event and event.asset_observation_data.asset_observation
            if observation is None or observation.asset_key.path[0] != spec.name:
                continue
            if observation.partition and (reason := observation.metadata.get(FAILED)):
                failed[observation.partition] = str(reason.value)
        cursor, has_more = page.cursor, page.has_more
    return failed


def _is_in_run(context: dg.AssetExecutionContext, spec: BulkInferenceSpec, table: str) -> bool:
    """Whether the run has a step for a table, and executes it."""
    if dg.AssetKey([spec.name, table]) not in context.job_def.asset_layer.selected_asset_keys:
        return False
    steps = context.run.step_keys_to_execute
    return steps is None or f"{spec.name}__{table}" in steps


def _log_check(context: dg.AssetExecutionContext, result: dg.AssetCheckResult) -> None:
    assert result.check_name is not None
    context.log_event(
        dg.AssetCheckEvaluation(
            asset_key=context.asset_key,
            check_name=result.check_name,
            passed=result.passed,
            metadata=result.metadata,
            severity=result.severity,
            description=result.description,
        )
    )


def _shown(name: str, value: Any) -> Any:
    """A value of the metadata as the UI shows it well."""
    if isinstance(value, float):
        return float(f"{value:.4g}")  # the rest of the digits is noise
    if isinstance(value, str) and name.startswith("path_"):
        return dg.MetadataValue.path(value)
    return value


def _metadata(store: Store, table: str, report: StageReport) -> dict[str, Any]:
    schema = store.partition(table, report.partition).schema()
    columns = [
        dg.TableColumn(
            field.name,
            str(field.type),
            description=(field.metadata or {}).get(b"description", b"").decode() or None,
        )
        for field in schema
    ]
    return {
        "dagster/partition_row_count": dg.MetadataValue.int(report.rows),
        "dagster/column_schema": dg.TableSchema(columns=columns),
        "path": dg.MetadataValue.path(report.path),
        **report.metadata,
    }
