"""raw_dataset + completions → output: every request beside its row, in the source's order."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from bulk_pipeline.spec import BulkInferenceSpec, GeneratorSettings
from bulk_pipeline.stages.answers import Answers, answer_settings
from bulk_pipeline.stages.best_of import COLUMNS as BEST_OF
from bulk_pipeline.stages.best_of import keep_best
from bulk_pipeline.stages.exporters import EXPORTERS, Write, file_name, token_bytes
from bulk_pipeline.stages.row_sampling import sampling_inputs
from bulk_pipeline.stages.rows import RowStream
from bulk_pipeline.stages.stage_report import StageReport
from bulk_pipeline.storage.manifest import Manifest
from bulk_pipeline.storage.partition import Partition
from bulk_pipeline.storage.schemas import COMPLETIONS, OUTPUT, PROMPTS, RAW_DATASET, ROW_ERROR_FIELD
from bulk_pipeline.storage.store import Store

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
    sampling = completions_manifest.meta.get("made_with", {}).get("sampling")
    sampling = sampling or sampling_inputs(spec.sampling)
    names = [field.name for field in source_columns]
    answers = Answers(spec.output, sampling, spec.prompt.assistant_prefix, names)
    prompts = _prompts(store, completions_manifest, key) if answers.needs_prompts else None
    num_kept = sampling["n"] if sampling.get("best_of") else None
    schema = pa.schema([*source_columns, *answers.fields])
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
            batches = _completions(completions, answers, num_kept)
            for table in _joined(raw, batches, prompts, answers, schema):
                tokens += pc.sum(table["completion_tokens"]).as_py()
                part.write(table)
                for write in exports:
                    write(table, completions_manifest.meta)
        num_rows = completions_manifest.num_rows
        if num_kept:
            num_rows = num_rows // sampling["best_of"] * num_kept
        _check_conserved(key, part.part.rows, num_rows)
        writer.commit(
            [part.part],
            complete=True,
            inputs={
                table: [part.name for part in manifest.parts]
                for table, manifest in (
                    (RAW_DATASET, raw_manifest),
                    (COMPLETIONS, completions_manifest),
                )
            }
            | {"answers": answer_settings(spec.output)},
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


def _completions(
    completions: Partition, answers: Answers, num_kept: int | None
) -> Iterator[pa.RecordBatch]:
    """The completions that the output has, with the columns that are needed."""
    names = ["row_id", "row_index", *answers.columns_read]
    if num_kept is None:
        return completions.read(names)
    return keep_best(completions.read(list(dict.fromkeys([*names, *BEST_OF]))), num_kept)


def _joined(
    raw: Partition,
    completions: Iterator[pa.RecordBatch],
    prompts: Partition | None,
    answers: Answers,
    schema: pa.Schema,
) -> Iterator[pa.Table]:
    """Yield the joined rows; checks that each completion's row has the same row_id."""
    source_names = schema.names[: -len(answers.fields)]
    rows = RowStream(raw.read(source_names))
    prompt_rows = RowStream(prompts.read(["row_index", "prompt"])) if prompts else None
    next_index = 0
    for batch in completions:
        row_index = batch.column("row_index")
        found = rows.take(row_index)
        if found["row_id"].combine_chunks() != batch.column("row_id"):
            raise ValueError(
                f"partition {raw.key}: {COMPLETIONS} was made from another {RAW_DATASET}; "
                f"materialise prompts and completions again"
            )
        distinct = np.unique(row_index.to_numpy())
        assert distinct[0] in (next_index - 1, next_index), (distinct[0], next_index)
        assert (np.diff(distinct) == 1).all(), distinct
        next_index = distinct[-1] + 1
        columns = [found[name] for name in source_names]
        texts = prompt_rows.take(row_index)["prompt"].to_pylist() if prompt_rows else None
        columns += answers.columns(batch, texts)
        yield pa.Table.from_arrays(columns, schema=schema)
    num_rows = raw.complete_manifest().num_rows
    if next_index != num_rows:
        raise ValueError(
            f"partition {raw.key}: {COMPLETIONS} has rows 0 to {next_index - 1}, {RAW_DATASET} "
            f"has {num_rows}; materialise prompts and completions again"
        )


def _prompts(store: Store, completions: Manifest, key: str) -> Partition:
    """The prompts that the completions were made from."""
    prompts = store.partition(PROMPTS, key)
    parts = [part.name for part in prompts.complete_manifest().parts]
    if completions.inputs.get("prompts") != parts:
        raise ValueError(
            f"partition {key}: {COMPLETIONS} was made from other {PROMPTS}, and output.reasoning "
            f"needs theirs; materialise completions again"
        )
    return prompts


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
