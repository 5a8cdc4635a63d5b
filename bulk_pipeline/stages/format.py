"""The prompts stage: rows of raw_dataset in, rendered and tokenised prompts out.

Every input row gives one output row, in order; a row that cannot run has a status that says why.
No weights are loaded and no GPU is used.
"""

import hashlib
import logging
import time
from collections.abc import Mapping
from datetime import date as Date
from typing import Any

from bulk_pipeline.spec import BulkInferenceSpec, GeneratorSettings, SamplingSpec
from bulk_pipeline.stages.chat_template import chat_template_text
from bulk_pipeline.stages.formatter import Formatter
from bulk_pipeline.stages.prompt_rows import PromptCounts
from bulk_pipeline.stages.reasoning import check_reasoning
from bulk_pipeline.stages.rendering import Renderer
from bulk_pipeline.stages.row_sampling import SamplingReader, sampling_inputs, with_schema
from bulk_pipeline.stages.sampling_changes import (
    CHANGES,
    changes_metadata,
    merge_changes,
    stored_changes,
    with_changes,
)
from bulk_pipeline.stages.shortening import Shortener
from bulk_pipeline.stages.stage_report import StageReport
from bulk_pipeline.stages.template_check import check_template
from bulk_pipeline.stages.turns import RawColumns, TurnReader
from bulk_pipeline.storage.manifest import MANIFEST, Manifest
from bulk_pipeline.storage.partition import Partition
from bulk_pipeline.storage.schemas import PROMPTS, PROMPTS_SCHEMA, RAW_DATASET, ROW_ERROR_FIELD
from bulk_pipeline.storage.store import Store

BATCH_ROWS = 1024
log = logging.getLogger(__name__)


def format_partition(
    spec: BulkInferenceSpec,
    store: Store,
    key: str,
    settings: GeneratorSettings,
    sampling: Mapping[str, Any] | None = None,
    reset_sampling: bool = False,
) -> StageReport:
    """Render and tokenise one partition of raw_dataset.

    Parameters
    ----------
    sampling
        Values that take the place of the settings, for this partition and until they are reset.
    reset_sampling
        Forget the values that earlier runs put in place of the settings.

    Raises
    ------
    ValueError
        One line naming the field, if the settings cannot work; or the row, where
        `prompt.too_long` is ``fail``.
    """
    from bulk_pipeline.engine.tokenizer import (
        end_token_ids,
        load_tokenizer,
        read_config,
        resolve_model,
    )

    started, settings_sampling = time.monotonic(), spec.sampling
    folder = resolve_model(settings.model, settings.revision, tokenizer_only=True)
    tokenizer = load_tokenizer(folder)
    raw = store.partition(RAW_DATASET, key)
    raw_manifest = raw.complete_manifest()
    template = chat_template_text(spec.prompt, tokenizer)
    end_tokens = end_token_ids(folder, template, tokenizer)
    prompts = store.partition(PROMPTS, key)
    with prompts.writer() as writer:
        if any(path.endswith(MANIFEST) for path in writer.set_aside):
            log.warning("%s: sampling changed for it is lost with its manifest", prompts.label)
        stored = {} if reset_sampling else stored_changes(writer.manifest)
        changes = merge_changes(spec.sampling, stored, sampling) if sampling else stored
        spec = _with_schema(with_changes(spec, changes))
        check_reasoning(spec.output.reasoning, tokenizer.special_tokens)
        limit = max_sequence_length(settings, read_config(folder), spec.sampling)
        first_formatted = writer.manifest.meta.get("first_formatted") or Date.today().isoformat()
        date = spec.prompt.date or first_formatted
        columns, show_text = _raw_columns(raw, raw_manifest), spec.output.preview
        reader = TurnReader(spec.prompt, columns, tokenizer.special_pattern, show_text)
        sampling_reader = SamplingReader(
            spec.sampling,
            columns,
            end_tokens,
            tokenizer.special_tokens,
            show_text,
            spec.output.reasoning,
            settings.adapters,
        )
        renderer = Renderer(spec.prompt, tokenizer, template, date, show_text)
        check_template(spec, renderer, sampling_reader.default)
        shortener = Shortener(spec.prompt.too_long, limit, tokenizer, reader, renderer)
        formatter = Formatter(spec, reader, sampling_reader, renderer, shortener)
        counts = PromptCounts(limit)
        with writer.new_part(PROMPTS_SCHEMA) as part_writer:
            names = {*reader.names.values(), *sampling_reader.names.values()}
            for batch in raw.read(_columns_read(raw, raw_manifest, names), BATCH_ROWS):
                part_writer.write(formatter.format_batch(batch, counts))
        if part_writer.rows != raw_manifest.num_rows:
            raise RuntimeError(
                f"{prompts.label}: {raw_manifest.num_rows} rows in, {part_writer.rows} out"
            )
        meta = counts.meta() | {
            # samples of which the best are kept are requests, but no rows of the output
            "num_kept": counts.num_requests // spec.sampling.best_of * spec.sampling.n
            if spec.sampling.best_of
            else counts.num_requests,
            "max_seq_len": limit,
            "date": date,
            "first_formatted": first_formatted,
            "chat_template": spec.prompt.chat_template,
            "chat_template_hash": _hash(template),
            "end_tokens": {str(id_): origin for id_, origin in end_tokens.items()},
            **({CHANGES: changes} if changes else {}),
        }
        inputs = prompt_inputs(spec, settings, raw_manifest, tokenizer.files_hash(), template)
        writer.commit([part_writer.part], complete=True, inputs=inputs, meta=meta)
    seconds = time.monotonic() - started
    return StageReport(
        partition=key,
        rows=part_writer.rows,
        path=prompts.part_path(part_writer.part),
        metadata=counts.meta()
        | {
            "max_prompt_tokens": counts.max_prompt_tokens,
            "mean_prompt_tokens": counts.prompt_tokens / max(counts.num_ready, 1),
            "rows_per_second": part_writer.rows / max(seconds, 1e-9),
            **changes_metadata(settings_sampling, changes),
        },
    )


def prompt_inputs(
    spec: BulkInferenceSpec,
    settings: GeneratorSettings,
    raw: Manifest,
    tokenizer_hash: str,
    chat_template: str,
) -> dict[str, Any]:
    """What the prompts of a partition are made of; if it changes, they are stale."""
    return {
        "raw_epoch": raw.epoch,
        "raw_parts": [part.name for part in raw.parts],
        "prompt": spec.prompt.model_dump(mode="json"),
        "sampling": sampling_inputs(spec.sampling),
        "max_seq_len": settings.max_seq_len,
        "tokenizer": tokenizer_hash,
        "chat_template": _hash(chat_template),
        # rows may name them
        **(
            {"adapters": sorted(settings.adapters)}
            if "adapter" in spec.sampling.from_columns
            else {}
        ),
    } | _marks(spec)


def _marks(spec: BulkInferenceSpec) -> dict[str, Any]:
    """The marks of thoughts, where their budget is part of the requests."""
    marks = spec.output.reasoning if spec.sampling.may_budget_thoughts else None
    return {"reasoning": marks.model_dump()} if marks is not None else {}


def max_sequence_length(
    settings: GeneratorSettings, config: dict[str, Any], sampling: SamplingSpec
) -> int:
    """Most tokens of a prompt and its completion together."""
    made_for = config.get("max_position_embeddings")
    limit = settings.max_seq_len or made_for
    if limit is None:
        raise ValueError(
            "generator.max_seq_len must be set: the model's config.json does not say "
            "max_position_embeddings"
        )
    is_extended = settings.rope_scale is not None or settings.rope_alpha is not None
    if made_for is not None and limit > made_for and not is_extended:
        raise ValueError(
            f"generator.max_seq_len must not exceed what the model was made for ({made_for}), "
            f"got {limit}; lower it"
        )
    if sampling.max_new_tokens >= limit:
        raise ValueError(
            f"sampling.max_new_tokens must leave room for a prompt within {limit} tokens, "
            f"got {sampling.max_new_tokens}; lower it"
        )
    return limit


def _raw_columns(raw: Partition, manifest: Manifest) -> RawColumns:
    return RawColumns(
        stored=raw.schema().names if manifest.num_rows else None,  # an empty file has none
        renamed=manifest.meta.get("renamed_columns", {}),
        json_text=manifest.meta.get("json_text_columns", ()),
    )


def _columns_read(raw: Partition, manifest: Manifest, columns: set[str]) -> list[str] | None:
    """The raw columns that are read, `columns` and our own."""
    if not manifest.num_rows:
        return None
    names = {"row_id", "row_index", ROW_ERROR_FIELD.name, *columns}
    return [name for name in raw.schema().names if name in names]


def _with_schema(spec: BulkInferenceSpec) -> BulkInferenceSpec:
    """The settings with a JSON schema in place of its file."""
    return spec.model_copy(update={"sampling": with_schema(spec.sampling)})


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
