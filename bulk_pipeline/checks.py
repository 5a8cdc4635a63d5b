"""Asset checks: what is verified of the partitions that a step has just written."""

from collections.abc import Sequence

import dagster as dg
import polars as pl

from bulk_pipeline.engine.request import NOT_RUN, Status
from bulk_pipeline.store import COMPLETIONS, OUTPUT, PROMPTS, RAW_DATASET, Store
from bulk_pipeline.tables import scan_partition

CONSERVATION = "conservation"
UNIQUE_ROW_IDS = "unique_row_ids"
ERROR_RATE = "error_rate"
CHECKS = {RAW_DATASET: UNIQUE_ROW_IDS, COMPLETIONS: ERROR_RATE, OUTPUT: CONSERVATION}


def check_unique_row_ids(store: Store, keys: Sequence[str]) -> dg.AssetCheckResult:
    """Every row_id stands once in its partition."""
    duplicates = {}
    for key in keys:
        ids = scan_partition(store.partition(RAW_DATASET, key)).select(
            (pl.len() - pl.col("row_id").n_unique()).alias("repeated")
        )
        if repeated := ids.collect().item():
            duplicates[key] = repeated
    return dg.AssetCheckResult(
        check_name=UNIQUE_ROW_IDS,
        passed=not duplicates,
        metadata={"partitions_with_duplicates": dg.MetadataValue.json(duplicates)},
    )


def check_error_rate(store: Store, keys: Sequence[str]) -> dg.AssetCheckResult:
    """No request ended without an answer; a warning, since a bad row is the row's business."""
    failed, requests = 0, 0
    for key in keys:
        manifest = store.partition(COMPLETIONS, key).complete_manifest()
        requests += manifest.num_rows
        counts = manifest.meta["status_counts"]
        failed += sum(counts.get(status, 0) for status in (*NOT_RUN, Status.ERROR))
    return dg.AssetCheckResult(
        check_name=ERROR_RATE,
        passed=failed == 0,
        severity=dg.AssetCheckSeverity.WARN,
        metadata={
            "requests_without_answer": failed,
            "error_rate": failed / requests if requests else 0.0,
        },
    )


def check_conservation(store: Store, keys: Sequence[str]) -> dg.AssetCheckResult:
    """Each row of the source is in output as often as it asked for samples."""
    broken = {}
    for key in keys:
        rows = {
            table: store.partition(table, key).complete_manifest().num_rows
            for table in (RAW_DATASET, PROMPTS, COMPLETIONS, OUTPUT)
        }
        wanted = store.partition(PROMPTS, key).complete_manifest().meta["num_requests"]
        if not (rows[RAW_DATASET] == rows[PROMPTS] and wanted == rows[OUTPUT]):
            broken[key] = {**rows, "requests": wanted}
    return dg.AssetCheckResult(
        check_name=CONSERVATION,
        passed=not broken,
        metadata={"partitions_not_conserved": dg.MetadataValue.json(broken)},
    )
