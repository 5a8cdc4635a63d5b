"""Asset checks: what is verified of the partitions that a step has just written.

A check looks at one partition at a time; over several, its metadata names those that fail. None of
them blocks: a blocking check would hold back the good partitions of a run with the bad ones. The
same rules stop a partition where it is committed (`stages`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg
import polars as pl
import pyarrow as pa

from bulk_pipeline.engine.request import NOT_RUN, Status
from bulk_pipeline.spec import BulkInferenceSpec
from bulk_pipeline.storage.manifest import Manifest
from bulk_pipeline.storage.schemas import (
    COMPLETIONS,
    COMPLETIONS_SCHEMA,
    OUTPUT,
    OUTPUT_FIELDS,
    PROMPTS,
    PROMPTS_SCHEMA,
    RAW_DATASET,
    ROW_ERROR_FIELD,
    ROW_FIELDS,
)
from bulk_pipeline.storage.store import Store
from bulk_pipeline.tables import scan_partition

MAX_EMPTY_RATE = 0.05  # of answers without text; more is a warning
MAX_LENGTH_RATE = 0.5  # of answers cut off at max_new_tokens; more is a warning
MAX_SHOWN = 100  # failing partitions in the metadata

# Columns that a table must have; raw_dataset and output have the source's beside them.
_COLUMNS = {
    RAW_DATASET: (*ROW_FIELDS, ROW_ERROR_FIELD),
    PROMPTS: tuple(PROMPTS_SCHEMA),
    COMPLETIONS: tuple(COMPLETIONS_SCHEMA),
    OUTPUT: (*ROW_FIELDS, *OUTPUT_FIELDS),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found in a partition: its numbers, which are added up, and a problem or None."""

    problem: Any = None
    bad: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class Check:
    """A check of one table; `rate` names the share ``bad / total`` in the metadata."""

    name: str
    description: str
    look: Callable[[BulkInferenceSpec, Store, str], Finding | None]
    severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR
    is_rate: bool = False


def check_specs(table: str, key: dg.AssetKey) -> list[dg.AssetCheckSpec]:
    """The checks of a table's asset."""
    return [
        dg.AssetCheckSpec(check.name, asset=key, description=check.description)
        for check in CHECKS[table]
    ]


def run_checks(
    spec: BulkInferenceSpec, store: Store, table: str, keys: Iterable[str]
) -> list[dg.AssetCheckResult]:
    """Run the checks of a table over partitions."""
    keys = list(keys)
    return [_run(check, spec, store, keys) for check in CHECKS[table]]


def _run(
    check: Check, spec: BulkInferenceSpec, store: Store, keys: Sequence[str]
) -> dg.AssetCheckResult:
    looks = {key: _look(check, spec, store, key) for key in keys}
    findings = {key: finding for key, finding in looks.items() if finding is not None}
    problems = {key: found.problem for key, found in findings.items() if found.problem is not None}
    metadata: dict[str, Any] = {
        "partitions": len(findings),
        "failing_partitions": dg.MetadataValue.json(dict(list(problems.items())[:MAX_SHOWN])),
    }
    if check.is_rate:
        total = sum(found.total for found in findings.values())
        bad = sum(found.bad for found in findings.values())
        metadata |= {"requests": total, check.name: bad / total if total else 0.0}
    return dg.AssetCheckResult(
        check_name=check.name,
        passed=not problems,
        severity=check.severity,
        metadata=metadata,
        description=f"{len(problems)} of {len(findings)} partitions fail: "
        f"{', '.join(list(problems)[:MAX_SHOWN])}"
        if problems
        else None,
    )


def _look(check: Check, spec: BulkInferenceSpec, store: Store, key: str) -> Finding | None:
    try:
        return check.look(spec, store, key)
    except Exception as error:  # a table that cannot be read is a finding of its own
        return Finding((str(error).splitlines() or [type(error).__name__])[0])


def _rate(bad: int, total: int, allowed: float) -> Finding:
    rate = bad / total if total else 0.0
    return Finding(round(rate, 6) if rate > allowed else None, bad, total)


def _complete(store: Store, table: str, key: str) -> Manifest | None:
    manifest = store.partition(table, key).manifest()
    return manifest if manifest is not None and manifest.complete else None


def _unique_row_ids(spec: BulkInferenceSpec, store: Store, key: str) -> Finding | None:
    if _complete(store, RAW_DATASET, key) is None:
        return None
    ids = scan_partition(store.partition(RAW_DATASET, key)).select(
        pl.len() - pl.col("row_id").n_unique()
    )
    repeated = ids.collect().item()
    return Finding(f"{repeated} repeated" if repeated else None)


def _schema(table: str) -> Callable[[BulkInferenceSpec, Store, str], Finding | None]:
    def look(spec: BulkInferenceSpec, store: Store, key: str) -> Finding | None:
        if _complete(store, table, key) is None:
            return None
        schema = store.partition(table, key).schema()
        wrong = [field.name for field in _COLUMNS[table] if not _has(schema, field)]
        return Finding(f"missing or of another type: {', '.join(wrong)}" if wrong else None)

    return look


def _has(schema: pa.Schema, field: pa.Field) -> bool:
    return field.name in schema.names and schema.field(field.name).type == field.type


def _status_counts(store: Store, key: str) -> dict[str, int] | None:
    """How the requests of a partition ended; also where too many of them failed."""
    manifest = store.partition(COMPLETIONS, key).manifest()
    return None if manifest is None else manifest.meta.get("status_counts")


def _error_rate(spec: BulkInferenceSpec, store: Store, key: str) -> Finding | None:
    if (counts := _status_counts(store, key)) is None:
        return None
    failed = sum(counts.get(status, 0) for status in (*NOT_RUN, Status.ERROR))
    return _rate(failed, sum(counts.values()), spec.output.max_error_rate)


def _length_rate(spec: BulkInferenceSpec, store: Store, key: str) -> Finding | None:
    if (counts := _status_counts(store, key)) is None or not spec.sampling.max_new_tokens:
        return None
    return _rate(counts.get(Status.LENGTH, 0), sum(counts.values()), MAX_LENGTH_RATE)


def _empty_rate(spec: BulkInferenceSpec, store: Store, key: str) -> Finding | None:
    if _complete(store, COMPLETIONS, key) is None or not spec.sampling.max_new_tokens:
        return None
    answers = scan_partition(store.partition(COMPLETIONS, key)).filter(
        pl.col("completion").is_not_null()
    )
    counts = answers.select(
        pl.len().alias("total"), (pl.col("completion").str.len_bytes() == 0).sum().alias("empty")
    ).collect()
    return _rate(counts["empty"].item(), counts["total"].item(), MAX_EMPTY_RATE)


def _matches_prompts(spec: BulkInferenceSpec, store: Store, key: str) -> Finding | None:
    prompts, completions = _complete(store, PROMPTS, key), _complete(store, COMPLETIONS, key)
    if prompts is None or completions is None:
        return None
    is_same = completions.inputs.get("prompts") == [part.name for part in prompts.parts]
    return Finding(None if is_same else "made from other prompts; materialise completions again")


def _conservation(spec: BulkInferenceSpec, store: Store, key: str) -> Finding | None:
    tables = (RAW_DATASET, PROMPTS, COMPLETIONS, OUTPUT)
    manifests = {table: _complete(store, table, key) for table in tables}
    rows = {table: None if m is None else m.num_rows for table, m in manifests.items()}
    prompts = manifests[PROMPTS]
    wanted = None if prompts is None else prompts.meta.get("num_requests")
    kept = None if prompts is None else prompts.meta.get("num_kept", wanted)  # best_of drops some
    is_same = rows[RAW_DATASET] == rows[PROMPTS] and rows[COMPLETIONS] == wanted
    is_kept = is_same and rows[OUTPUT] == kept and wanted is not None
    return Finding(None if is_kept else {**rows, "requests": wanted})


def _check_schema(table: str) -> Check:
    return Check("schema", "Our columns are there, each of its type.", _schema(table))


CHECKS: dict[str, tuple[Check, ...]] = {
    RAW_DATASET: (
        Check("unique_row_ids", "Every row_id stands once in its partition.", _unique_row_ids),
        _check_schema(RAW_DATASET),
    ),
    PROMPTS: (_check_schema(PROMPTS),),
    COMPLETIONS: (
        Check(
            "error_rate",
            "Of each partition's requests, at most output.max_error_rate have no answer.",
            _error_rate,
            is_rate=True,
        ),
        Check(
            "empty_rate",
            f"At most {MAX_EMPTY_RATE:.0%} of each partition's answers have no text.",
            _empty_rate,
            dg.AssetCheckSeverity.WARN,
            is_rate=True,
        ),
        Check(
            "length_rate",
            f"At most {MAX_LENGTH_RATE:.0%} of each partition's requests were cut off.",
            _length_rate,
            dg.AssetCheckSeverity.WARN,
            is_rate=True,
        ),
        Check("matches_prompts", "The answers belong to the stored prompts.", _matches_prompts),
        _check_schema(COMPLETIONS),
    ),
    OUTPUT: (
        Check(
            "conservation",
            "Each row of the source is in output as often as it asked for samples and turns.",
            _conservation,
        ),
        _check_schema(OUTPUT),
    ),
}
