"""The tables of a dataset: their names, and the columns that are this project's.

Every name and type of a column is said here, once. Two equal runs make equal columns, but for those
that are marked as not stable. What a later version adds comes behind what there was, so that an
earlier version's rows are read with nulls for it.
"""

from collections.abc import Sequence

import pyarrow as pa

RAW_DATASET, PROMPTS, COMPLETIONS, OUTPUT = "raw_dataset", "prompts", "completions", "output"
TABLES = (RAW_DATASET, PROMPTS, COMPLETIONS, OUTPUT)
SLICES = "slices"  # folder of the slices of completions, beside the tables


def _field(name: str, type_: pa.DataType, description: str, stable: bool = True) -> pa.Field:
    """Describe a column; one that is not stable may differ between two equal runs."""
    metadata = {"description": description} | ({} if stable else {"stable": "false"})
    return pa.field(name, type_, metadata=metadata)


ROW_FIELDS = (
    _field("row_id", pa.string(), "Identity of the input row, unique in its partition"),
    _field("row_index", pa.int64(), "Place of the input row in its partition, from 0"),
)
ROW_ERROR_FIELD = _field(
    "row_error", pa.string(), "Why the row cannot be used as it stands in the source, else null"
)

THINKING_FIELDS = [
    ("tokens", pa.int64()),
    ("start", pa.string()),
    ("end", pa.string()),
    ("is_open", pa.bool_()),
]
SAMPLING_TYPE = pa.struct(
    [
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("top_k", pa.int64()),
        ("min_p", pa.float64()),
        ("max_new_tokens", pa.int64()),
        ("min_new_tokens", pa.int64()),
        ("seed", pa.int64()),
        ("stop", pa.list_(pa.string())),
        ("stop_token_ids", pa.list_(pa.int64())),
        ("repetition_penalty", pa.float64()),
        ("frequency_penalty", pa.float64()),
        ("presence_penalty", pa.float64()),
        ("logit_bias", pa.list_(pa.struct([("token_id", pa.int64()), ("bias", pa.float64())]))),
        ("banned_token_ids", pa.list_(pa.int64())),
        ("logprobs", pa.int64()),
        ("prompt_logprobs", pa.bool_()),
        ("structured", pa.struct([("kind", pa.string()), ("value", pa.string())])),
        ("loop_guard", pa.struct([("ngram", pa.int64()), ("repeats", pa.int64())])),
        ("allowed_token_ids", pa.list_(pa.int64())),
        ("bad_words", pa.list_(pa.string())),
        ("banned_strings", pa.list_(pa.string())),
        ("thinking", pa.struct(THINKING_FIELDS)),
        ("adapter", pa.string()),
    ]
)
TOP_LOGPROBS_TYPE = pa.list_(
    pa.list_(pa.struct([("token_id", pa.int32()), ("logprob", pa.float32())]))
)

LATER_TURNS_TYPE = pa.list_(pa.struct([("text", pa.string()), ("input_ids", pa.list_(pa.int32()))]))

PROMPTS_SCHEMA = pa.schema(
    [
        *ROW_FIELDS,
        _field("prompt", pa.string(), "The exact text given to the model"),
        _field("input_ids", pa.list_(pa.int32()), "The prompt's token ids"),
        _field("prompt_tokens", pa.int32(), "Number of token ids"),
        _field("status", pa.string(), "ready, or why the row cannot run"),
        _field("error", pa.string(), "The reason in words, where status is not ready"),
        _field("truncated", pa.bool_(), "Whether the row's message was cut to fit"),
        _field("sampling", SAMPLING_TYPE, "The row's sampling values; seed is the run's"),
        _field("num_samples", pa.int32(), "How many completions the row asks for"),
        _field("num_turns", pa.int32(), "How many turns each of them has"),
        _field("later_turns", LATER_TURNS_TYPE, "What the model is given after each answer"),
    ]
)

PLACE = ("row_index", "sample_index", "turn")  # of a request; the order of the table
COMPLETIONS_SCHEMA = pa.schema(
    [
        *ROW_FIELDS,
        _field("sample_index", pa.int32(), "Which of the row's samples, from 0"),
        _field("turn", pa.int32(), "Which turn of a row with several, from 0"),
        _field("status", pa.string(), "How the request ended"),
        _field("completion", pa.string(), "The answer, without what ended it"),
        _field("completion_ids", pa.list_(pa.int32()), "All generated token ids"),
        _field("prompt_tokens", pa.int32(), "Tokens of the prompt"),
        _field("completion_tokens", pa.int32(), "Tokens generated, the end token included"),
        _field("stop_reason", pa.string(), "The end token's id or the stop string"),
        _field("incomplete_character", pa.bool_(), "Whether a cut-off character was removed"),
        _field("seed", pa.uint64(), "The request's own seed; null where sampling is greedy"),
        _field("max_new_tokens", pa.int32(), "The limit the request ran with"),
        _field("request_key", pa.string(), "Hash of what decides the answer; null if not run"),
        _field("error", pa.string(), "Why there is no usable answer, else null"),
        _field("produced_by", pa.string(), "Model, versions, settings as JSON", stable=False),
        _field("attempts", pa.int32(), "How often the request was started", stable=False),
        _field("cached_tokens", pa.int32(), "Prompt tokens found in the cache", stable=False),
        _field("queue_seconds", pa.float32(), "Seconds in the queue", stable=False),
        _field("prefill_seconds", pa.float32(), "Seconds to the first token", stable=False),
        _field("generate_seconds", pa.float32(), "Seconds from then to the last", stable=False),
        _field("logprobs", pa.list_(pa.float32()), "Each generated token's log-probability"),
        _field("cumulative_logprob", pa.float64(), "The sum of logprobs"),
        _field("top_logprobs", TOP_LOGPROBS_TYPE, "The best tokens in each one's place"),
        _field(
            "prompt_logprobs",
            pa.list_(pa.float32()),
            "Each prompt token's log-probability, the first one's apart",
        ),
        _field("answers_before", pa.uint64(), "Hash of the answers of the turns before, or null"),
    ]
)
FIXED_SCHEMAS = {PROMPTS: PROMPTS_SCHEMA, COMPLETIONS: COMPLETIONS_SCHEMA}

# What the output table takes from a completion, behind the source's columns.
OUTPUT_FIELDS = tuple(
    COMPLETIONS_SCHEMA.field(name)
    for name in (
        "sample_index",
        "turn",
        "status",
        "completion",
        "prompt_tokens",
        "completion_tokens",
        "stop_reason",
        "incomplete_character",
        "seed",
        "request_key",
        "error",
    )
)
# What it has besides where that is asked for, from the completion or made of it.
LOGPROB_FIELDS = tuple(
    COMPLETIONS_SCHEMA.field(name)
    for name in ("logprobs", "cumulative_logprob", "top_logprobs", "completion_ids")
)
PROMPT_LOGPROB_FIELDS = (
    COMPLETIONS_SCHEMA.field("prompt_logprobs"),
    _field("cumulative_prompt_logprob", pa.float64(), "The sum of prompt_logprobs"),
    _field("perplexity", pa.float64(), "Of the prompt: e to the mean of -prompt_logprobs"),
)
REASONING_FIELD = _field("reasoning", pa.string(), "What the model thought before its answer")
PARSED_FIELD = _field("parsed", pa.bool_(), "Whether the answer is what the schema describes")
OUR_COLUMNS = frozenset(
    field.name
    for field in (
        *ROW_FIELDS,
        ROW_ERROR_FIELD,
        *PROMPTS_SCHEMA,
        *COMPLETIONS_SCHEMA,
        *PROMPT_LOGPROB_FIELDS,
        REASONING_FIELD,
        PARSED_FIELD,
    )
)


def with_later_columns(
    batch: pa.RecordBatch, schema: pa.Schema | None, columns: Sequence[str] | None
) -> pa.RecordBatch:
    """The batch with nulls for those of the columns that came into the schema after it."""
    names = [] if schema is None else schema.names if columns is None else columns
    if schema is None or not set(names) - set(batch.schema.names):
        return batch
    arrays = {name: batch.column(name) for name in batch.schema.names}
    for name in names:
        if name not in arrays:
            arrays[name] = pa.nulls(batch.num_rows, schema.field(name).type)
    # the schema's own order, where whole rows are asked for
    order = schema.names if columns is None else list(arrays)
    return pa.RecordBatch.from_arrays([arrays[name] for name in order], names=order)
