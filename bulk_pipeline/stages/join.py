"""raw_dataset + completions → output: every request beside its row, in the source's order."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from bulk_pipeline.spec import BulkInferenceSpec, GeneratorSettings
from bulk_pipeline.stages.exporters import EXPORTERS, Write, file_name, token_bytes
from bulk_pipeline.stages.rows import RowStream
from bulk_pipeline.store import (
    COMPLETIONS,
    OUTPUT,
    OUTPUT_FIELDS,
    RAW_DATASET,
    ROW_ERROR_FIELD,
    Partition,
    StageReport,
    Store,
)

PREVIEW_ROWS = 5


def join_partition(
    spec: BulkInferenceSpec, store: Store, key: str, model: GeneratorSettings | None = None
) -> StageReport:
    """Join a partition's rows with their completions; a streaming merge on ``row_index``.

    Writes the Parquet table, and a file beside it for each of `output.formats`. `model` is
    the one that answered, by default that of the dataset alone.

    Raises
    ------
    ValueError
        If an upstream table is missing or unfinished, or does not belong to the other.
    RuntimeError
        If another run is writing the partition.
    """
    raw, completions = store.partition(RAW_DATASET, key), store.partition(COMPLETIONS, key)
    raw_manifest, completions_manifest = raw.complete_manifest(), completions.complete_manifest()
    source_columns = [field for field in raw.schema() if field.name != ROW_ERROR_FIELD.name]
    schema = pa.schema([*source_columns, *OUTPUT_FIELDS])
    output = store.partition(OUTPUT, key)
    formats = set(spec.output.formats)
    tokens = 0
    with output.writer() as writer:
        with ExitStack() as stack:
            part = stack.enter_context(writer.new_part(schema))
            exports = [
                stack.enter_context(_export(output, name, model or spec.generator))
                for name in sorted(formats)
            ]
            for table in _joined(raw, completions, schema):
                tokens += pc.sum(table["completion_tokens"]).as_py()
                part.write(table)
                for write in exports:
                    write(table, completions_manifest.meta)
        _check_conserved(key, part.part.rows, completions_manifest.num_rows)
        writer.commit(
            [part.part],
            complete=True,
            inputs={
                table: [part.name for part in manifest.parts]
                for table, manifest in (
                    (RAW_DATASET, raw_manifest),
                    (COMPLETIONS, completions_manifest),
                )
            },
            meta=completions_manifest.meta,
        )
        for name in EXPORTERS.keys() - formats:
            output.delete(file_name(name))
    return StageReport(
        partition=key,
        rows=part.part.rows,
        path=output.part_path(part.part),
        metadata={
            "input_rows": raw_manifest.num_rows,
            "completion_tokens": tokens,
            **{f"path_{name}": f"{output.path}/{file_name(name)}" for name in sorted(formats)},
            **{
                f"status_{status}": count
                for status, count in completions_manifest.meta["status_counts"].items()
            },
        },
    )


def preview(partition: Partition, max_characters: int = 200) -> list[dict[str, Any]]:
    """The first few rows of a finished output partition, long values cut."""
    batch = next(iter(partition.read(batch_size=PREVIEW_ROWS)), None)
    rows = batch.to_pylist() if batch is not None else []
    return [{name: _short(value, max_characters) for name, value in row.items()} for row in rows]


def _short(value: Any, max_characters: int) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else orjson.dumps(value, default=str).decode()
    return text if len(text) <= max_characters else text[: max_characters - 1] + "…"


def _joined(raw: Partition, completions: Partition, schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield the joined rows; checks that each completion's row has the same row_id."""
    names = [name for name in schema.names if name not in {f.name for f in OUTPUT_FIELDS}]
    rows = RowStream(raw.read(names))
    wanted = ["row_id", "row_index", *(field.name for field in OUTPUT_FIELDS)]
    next_index = 0
    for batch in completions.read(wanted):
        found = rows.take(batch.column("row_index"))
        if found["row_id"].combine_chunks() != batch.column("row_id"):
            raise ValueError(
                f"partition {raw.key}: {COMPLETIONS} was made from another {RAW_DATASET}; "
                f"materialise prompts and completions again"
            )
        distinct = np.unique(batch.column("row_index").to_numpy())
        assert distinct[0] in (next_index - 1, next_index), (distinct[0], next_index)
        assert (np.diff(distinct) == 1).all(), distinct
        next_index = distinct[-1] + 1
        columns = [found[name] for name in names]
        columns += [batch.column(field.name) for field in OUTPUT_FIELDS]
        yield pa.Table.from_arrays(columns, schema=schema)
    num_rows = raw.complete_manifest().num_rows
    if next_index != num_rows:
        raise ValueError(
            f"partition {raw.key}: {COMPLETIONS} has rows 0 to {next_index - 1}, {RAW_DATASET} "
            f"has {num_rows}; materialise prompts and completions again"
        )


def _check_conserved(key: str, rows: int, expected: int) -> None:
    if rows != expected:
        raise AssertionError(f"partition {key}: {rows} output rows for {expected} completions")


@contextmanager
def _export(output: Partition, name: str, model: GeneratorSettings | None) -> Iterator[Write]:
    """Open the format's file; it appears, whole, when the block ends without error."""
    path = f"{output.path}/{file_name(name)}"
    with (
        output.store.open_atomic(path) as file,
        EXPORTERS[name](file, token_bytes(model)) as write,
    ):
        yield write
