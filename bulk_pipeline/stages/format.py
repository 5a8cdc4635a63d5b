"""The prompts stage: rows of raw_dataset in, rendered and tokenised prompts out.

Every input row gives one output row, in order; a row that cannot run has a status that says why.
No weights are loaded and no GPU is used. Which text counts as a special token: what the chat
template, the assistant prefix and (with the family raw) the user's template write; the same text
inside a row does not, unless `prompt.allow_special_tokens` is set.
"""

import hashlib
import logging
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date as Date
from importlib import resources
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from jinja2 import TemplateSyntaxError

from bulk_pipeline.engine.request import READY, Status
from bulk_pipeline.manifest import MANIFEST, Manifest
from bulk_pipeline.partition import Partition
from bulk_pipeline.schemas import (
    PROMPTS,
    PROMPTS_SCHEMA,
    RAW_DATASET,
    ROW_ERROR_FIELD,
    SAMPLING_TYPE,
)
from bulk_pipeline.spec import (
    FAMILIES,
    BulkInferenceSpec,
    GeneratorSettings,
    PromptSpec,
    ReasoningSpec,
    SamplingSpec,
)
from bulk_pipeline.stages.reasoning import check_not_open, check_reasoning, is_reasoning_open
from bulk_pipeline.stages.row_sampling import (
    RowSampling,
    SamplingReader,
    sampling_inputs,
    with_schema,
)
from bulk_pipeline.stages.sampling_changes import (
    CHANGES,
    changes_metadata,
    merge_changes,
    stored_changes,
    with_changes,
)
from bulk_pipeline.stages.stage_report import StageReport
from bulk_pipeline.stages.turns import (
    MAX_TEMPLATE_CHARS,
    BadRow,
    Chat,
    RawColumns,
    Turn,
    TurnReader,
)
from bulk_pipeline.store import Store

if TYPE_CHECKING:  # transformers takes seconds to import
    from bulk_pipeline.engine.tokenizer import PromptTokenizer

BATCH_ROWS = 1024
MAX_CUTS = 8  # tries to cut a message so that it fits; two or three are usual
SLOT = "\ue000"  # stands for an answer where a template is tried
log = logging.getLogger(__name__)

DATE_CALL = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")


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
        formatter = Formatter(spec, tokenizer, reader, sampling_reader, template, date, limit)
        formatter.check_template()
        counts = _Counts(limit)
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


def chat_template_text(prompt: PromptSpec, tokenizer: "PromptTokenizer") -> str:
    """The chat template's source: the model's own, a family's or a file's."""
    name = prompt.chat_template
    if name == "model":
        if tokenizer.chat_template is None:
            raise ValueError(
                f"prompt.chat_template: the model in {tokenizer.folder} has no chat template; "
                f"set it to a family ({', '.join(FAMILIES)}) or a file"
            )
        return tokenizer.chat_template
    if name in FAMILIES:
        folder = resources.files("bulk_pipeline") / "chat_templates"
        return (folder / f"{name}.jinja").read_text("utf-8")
    if not Path(name).is_file():
        raise ValueError(
            f"prompt.chat_template must be model, a family ({', '.join(FAMILIES)}) "
            f"or a file, got {name!r}; correct it"
        )
    return Path(name).read_text("utf-8")


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


def fix_date(chat_template: str, date: str) -> str:
    """`chat_template` with the given day in place of today."""
    day = Date.fromisoformat(date)
    fixed = DATE_CALL.sub(lambda match: repr(day.strftime(match[2])), chat_template)
    if "strftime_now(" in fixed:
        raise ValueError(
            "prompt.chat_template: it calls strftime_now with something other than a literal "
            "format, so its date cannot be fixed; set prompt.chat_template to an edited copy"
        )
    return fixed


@dataclass(slots=True)
class _Counts:
    """Numbers of a partition; tokens are those of ready rows, without later turns."""

    limit: int
    statuses: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    max_prompt_tokens: int = 0
    max_request_tokens: int = 0
    num_requests: int = 0

    @property
    def num_ready(self) -> int:
        return self.statuses[READY]

    def meta(self) -> dict[str, Any]:
        """What the manifest says; `max_request_tokens` is the longest row with its answers."""
        return {
            "status_counts": dict(self.statuses),
            "num_requests": self.num_requests,
            "prompt_tokens": self.prompt_tokens,
            "max_request_tokens": self.max_request_tokens,
        }

    def add(self, rows: Sequence["_Row"]) -> None:
        self.statuses.update(row.status for row in rows)
        self.num_requests += sum(row.sampling.num_samples * row.num_turns for row in rows)
        for row in rows:
            if row.status == READY and row.ids is not None:
                length = len(row.ids)
                self.prompt_tokens += length
                self.max_prompt_tokens = max(self.max_prompt_tokens, length)
                most = row.num_tokens(row.sampling.max_new_tokens)
                self.max_request_tokens = max(self.max_request_tokens, min(most, self.limit))


@dataclass(slots=True)
class _Row:
    """A row on its way; `chat` is None where it had none.

    `later` are the texts that follow each answer but the last, and `later_ids` their token ids.
    """

    row_id: str
    sampling: RowSampling
    chat: Chat | None = None
    prompt: str | None = None
    ids: list[int] | None = None
    num_turns: int = 1
    later: list[str] = field(default_factory=list)
    later_ids: list[list[int]] = field(default_factory=list)
    status: str = READY
    error: str | None = None
    truncated: bool = False

    def set_aside(self, status: str, error: str) -> None:
        if self.status == READY:
            self.status, self.error = status, error

    def num_tokens(self, tokens_of_answer: int) -> int:
        """Tokens of the prompt, all later turns and their answers, which have so many each."""
        assert self.ids is not None
        later = sum(map(len, self.later_ids))
        return len(self.ids) + later + self.num_turns * tokens_of_answer


class Formatter:
    """Turns batches of raw_dataset into batches of prompts."""

    def __init__(
        self,
        spec: BulkInferenceSpec,
        tokenizer: "PromptTokenizer",
        reader: TurnReader,
        sampling_reader: SamplingReader,
        chat_template: str,
        date: str,
        limit: int,
    ):
        self._prompt, self._tokenizer, self._reader = spec.prompt, tokenizer, reader
        self._sampling_reader = sampling_reader
        self._show_text = spec.output.preview
        self._reasoning = spec.output.reasoning
        self._is_structured = spec.sampling.structured_output is not None
        self._template = fix_date(chat_template, date)
        # Llama 3's templates show this variable, and a default where it is not given.
        self._variables: dict[str, str] = (
            {"date_string": Date.fromisoformat(date).strftime("%d %b %Y")}
            if "date_string" in chat_template
            else {}
        )
        self._limit = limit

    def check_template(self) -> None:
        """Raise a ValueError if the chat template cannot render the dataset's kind of prompt."""
        system = self._prompt.system
        turns = [{"role": "system", "content": system}] if system is not None else []
        chat = Chat([*turns, {"role": "user", "content": "Hello"}])
        try:
            rendered = self._render_all([chat])[0]
        except TemplateSyntaxError as error:
            raise ValueError(
                f"prompt.chat_template, line {error.lineno}: {error.message}; "
                "correct the template or choose another"
            ) from None
        except Exception as error:  # whatever a template raises
            if system is None and self._prompt.messages_column:
                return  # it may need more turns than one
            if system is None:
                raise ValueError(
                    f"prompt.chat_template fails on a plain message ({error}); choose another"
                ) from None
            rendered, reason = "", f" ({error})"
        else:
            reason = ""
        if system and system.strip() not in rendered:
            raise ValueError(
                f"prompt.system: the chat template {self._prompt.chat_template} takes no system "
                f"prompt{reason}; remove prompt.system, or set prompt.chat_template to a family "
                "or file that takes one"
            )
        if self._is_structured and self._reasoning is not None:
            check_not_open(rendered, self._prompt.assistant_prefix, self._reasoning)
        if self._prompt.turns_column:
            self._check_conversations(turns)

    def _check_conversations(self, system: list[Turn]) -> None:
        """Raise a ValueError if the chat template does not take answers as they are."""
        user = {"role": "user", "content": "Hello"}
        row = _Row(
            "", self._sampling_reader.default, Chat([*system, user, user], "", (len(system),), SLOT)
        )
        self._render_one(row)
        self._encode([row])
        if row.status != READY:
            raise ValueError(
                f"prompt.turns_column: {row.error}; set prompt.chat_template to a family or file "
                "for several turns"
            )
        marks = self._reasoning or ReasoningSpec()
        answer = f"{marks.start}\nWell.\n{marks.end}\n\nHello"
        turns = [*system, user, {"role": "assistant", "content": answer}, user]
        if answer not in self._render_all([Chat(turns)])[0]:
            raise ValueError(
                f"prompt.turns_column: the chat template {self._prompt.chat_template} drops what "
                f"stands between {marks.start} and {marks.end} in earlier answers, and the next "
                "turn goes on from answers as they were generated; set prompt.chat_template to a "
                "copy that keeps it"
            )

    def format_batch(self, batch: pa.RecordBatch, counts: _Counts) -> pa.RecordBatch:
        """Format a batch of raw rows; the result has as many rows, in the same order."""
        rows = self._read(batch)
        self._render(rows)
        self._encode(rows)
        for row in rows:
            if row.status == READY and self._is_too_long(row):
                self._shorten(row)
        self._open_thoughts(rows)
        counts.add(rows)
        columns = [
            batch.column("row_id"),
            batch.column("row_index"),
            [row.prompt for row in rows],
            [row.ids for row in rows],
            [None if row.ids is None else len(row.ids) for row in rows],
            [row.status for row in rows],
            [row.error for row in rows],
            [row.truncated for row in rows],
            _sampling_column([row.sampling for row in rows]),
            [row.sampling.num_samples for row in rows],
            [row.num_turns for row in rows],
            [_later_turns(row) for row in rows],
        ]
        arrays = [
            column if isinstance(column, pa.Array) else pa.array(column, column_field.type)
            for column, column_field in zip(columns, PROMPTS_SCHEMA, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, names=PROMPTS_SCHEMA.names)

    def _open_thoughts(self, rows: Sequence[_Row]) -> None:
        """Let budgets count from the first token where a prompt ends within thoughts."""
        prefix, marks = self._prompt.assistant_prefix, self._reasoning
        for row in rows:
            opened = row.sampling.opened
            if opened is None or marks is None or row.prompt is None:
                continue
            if is_reasoning_open(row.prompt, prefix, marks):
                row.sampling = opened

    def _read(self, batch: pa.RecordBatch) -> list[_Row]:
        default = self._sampling_reader.default
        rows = [_Row(row_id, default) for row_id in batch.column("row_id").to_pylist()]
        for row, values in zip(rows, batch.to_pylist(), strict=True):
            if row_error := values.get(ROW_ERROR_FIELD.name):
                row.set_aside(Status.INVALID, row_error)
                continue
            try:
                row.sampling = self._sampling_reader.read(values)
            except BadRow as bad:
                row.set_aside(bad.status, bad.reason)
            try:
                chat = self._reader.read(values)
            except BadRow as bad:
                row.set_aside(bad.status, bad.reason)
                row.num_turns = bad.num_turns
                continue
            row.num_turns = chat.num_turns
            if row.status == READY:
                row.chat = chat
        return rows

    def _render(self, rows: Sequence[_Row]) -> None:
        """Render all rows at once, or one by one where one of them is refused."""
        waiting = [row for row in rows if row.chat is not None]
        if not waiting:
            return
        try:
            texts = iter(self._render_all([row.chat for row in waiting if row.chat is not None]))
        except Exception:  # whatever a template raises
            for row in waiting:
                self._render_one(row)
            return
        for row in waiting:
            self._split(row, list(islice(texts, row.num_turns)))

    def _render_one(self, row: _Row) -> None:
        assert row.chat is not None
        try:
            texts = self._render_all([row.chat])
        except Exception as error:  # whatever a template raises
            shown = f": {error}" if self._show_text else ""
            row.set_aside(Status.INVALID, f"the chat template refuses the row{shown}")
            return
        self._split(row, texts)

    def _render_all(self, chats: Sequence[Chat]) -> list[str]:
        """The text up to each answer: one for a chat, several for a conversation."""
        prefix, one_bos = self._prompt.assistant_prefix, self._tokenizer.one_bos
        stages = [turns for chat in chats for turns in chat.up_to_each(prefix)]
        texts = self._tokenizer.apply_chat_template(stages, self._template, **self._variables)
        return [one_bos(text + prefix) for text in texts]

    def _split(self, row: _Row, texts: Sequence[str]) -> None:
        """Take a conversation's texts apart: the prompt, and what follows each answer.

        Some templates put a blank before an answer, which the model then generates itself.
        """
        assert row.chat is not None
        row.prompt, slot = texts[0], row.chat.slot
        for before, text in pairwise(texts):
            blank, found, following = text.removeprefix(before).partition(slot)
            if not text.startswith(before) or not found or blank.strip() or slot in following:
                row.prompt = None
                row.set_aside(
                    Status.INVALID,
                    f"the chat template {self._prompt.chat_template} does not keep the text before "
                    "an answer as it was when that was generated",
                )
                return
            row.later.append(following)

    def _encode(self, rows: Sequence[_Row]) -> None:
        """Tokenise rendered rows; those without guarded text all at once."""
        plain: list[_Row] = []
        for row in rows:
            if row.chat is None or row.prompt is None:
                continue
            num_chars = len(row.prompt) + sum(map(len, row.later))
            if num_chars > MAX_TEMPLATE_CHARS + _num_chars(row.chat):
                row.prompt = None
                row.set_aside(
                    Status.INVALID,
                    f"the chat template adds more than {MAX_TEMPLATE_CHARS} characters",
                )
            elif row.chat.guard:
                self._encode_guarded(row, row.chat.guard)
            else:
                plain.append(row)
        ids = self._tokenizer.encode_batch([row.prompt for row in plain if row.prompt is not None])
        for row, row_ids in zip(plain, ids, strict=True):
            row.ids = row_ids
            self._encode_later(row, row.later)

    def _encode_guarded(self, row: _Row, guard: str) -> None:
        assert row.prompt is not None
        texts = [row.prompt, *row.later]
        row.prompt, *row.later = (text.replace(guard, "") for text in texts)
        try:
            marked = [self._tokenizer.mark(text).replace(guard, "") for text in texts]
        except ValueError as error:
            row.set_aside(Status.INVALID, f"the row {error} beside the text of special tokens")
            return
        row.ids = self._tokenizer.encode_marked(marked[0])
        self._encode_later(row, marked[1:], is_marked=True)

    def _encode_later(self, row: _Row, texts: Sequence[str], is_marked: bool = False) -> None:
        """Tokenise what follows the answers, each as it stands behind one."""
        assert row.chat is not None
        encode_after = self._tokenizer.encode_after
        try:
            row.later_ids = [encode_after(row.chat.slot, text, is_marked) for text in texts]
        except ValueError as error:
            row.set_aside(Status.INVALID, f"the text behind an answer {error}")

    def _is_too_long(self, row: _Row) -> bool:
        """Whether the first answer does not fit; how long it is decides about the next ones."""
        assert row.ids is not None
        return len(row.ids) + row.sampling.max_new_tokens > self._limit

    def _shorten(self, row: _Row) -> None:
        """Do as `prompt.too_long` says with a row that does not fit."""
        assert row.ids is not None
        new_tokens = row.sampling.max_new_tokens
        reason = f"{len(row.ids)} prompt tokens and {new_tokens} new ones exceed {self._limit}"
        if self._prompt.too_long == "fail":
            raise ValueError(
                f"row {row.row_id}: {reason}; shorten it, or set prompt.too_long to another value"
            )
        if self._prompt.too_long == "error_row":
            row.set_aside(Status.TOO_LONG, reason)
        elif not self._truncate(row):
            row.set_aside(Status.TOO_LONG, f"{reason}, and cutting its message does not help")

    def _truncate(self, row: _Row) -> bool:
        """Cut the row's last message until it fits; False if no cut does.

        Tokens at a cut can join with their new neighbours, so each cut is rendered and counted.
        """
        assert row.chat is not None
        assert row.ids is not None
        tokenizer, guard = self._tokenizer, row.chat.guard
        try:
            message = tokenizer.mark(row.chat.turns[-1]["content"])
        except ValueError:
            return False
        message = message.replace(guard, "") if guard else message
        offsets = tokenizer.offsets(message)
        num_kept = len(offsets)
        num_tokens = len(row.ids)
        for _ in range(MAX_CUTS):
            num_kept -= num_tokens + row.sampling.max_new_tokens - self._limit
            if num_kept <= 0:
                return False
            cut = self._with_message(row, _cut(message, offsets, num_kept, self._prompt.too_long))
            if cut is None:
                return False
            if not self._is_too_long(cut):
                row.chat, row.prompt, row.ids = cut.chat, cut.prompt, cut.ids
                row.truncated = True
                return True
            assert cut.ids is not None
            num_tokens = len(cut.ids)
        return False

    def _with_message(self, row: _Row, message: str) -> _Row | None:
        """The row with another last message, rendered and tokenised; None if that fails."""
        assert row.chat is not None
        if not message.strip():
            return None
        *turns, last = row.chat.turns
        # Its own special tokens are still marked, so that only the row's text is guarded.
        guarded = self._reader.guard([*turns, {**last, "content": message}], row.chat.guard)
        last = guarded.turns[-1]
        last = {**last, "content": self._tokenizer.unmark(last["content"])}
        changed = _Row(row.row_id, row.sampling, Chat([*guarded.turns[:-1], last], guarded.guard))
        self._render_one(changed)
        self._encode([changed])
        return changed if changed.status == READY and changed.ids is not None else None


def _later_turns(row: _Row) -> list[dict[str, Any]] | None:
    if not row.later_ids:
        return None
    pairs = zip(row.later, row.later_ids, strict=True)
    return [{"text": text, "input_ids": ids} for text, ids in pairs]


def _sampling_column(samplings: Sequence[RowSampling]) -> pa.Array:
    """The rows' values; rows with the same settings share one object."""
    distinct = {id(sampling): sampling for sampling in samplings}
    places = {each: place for place, each in enumerate(distinct)}
    values = pa.array([sampling.values for sampling in distinct.values()], SAMPLING_TYPE)
    return values.take(pa.array([places[id(each)] for each in samplings], pa.int32()))


def _cut(message: str, offsets: Sequence[tuple[int, int]], num_kept: int, how: str) -> str:
    """Keep `num_kept` tokens of a message: its end, its start, or both."""
    num_head = {"truncate_left": 0, "truncate_right": num_kept}.get(how, (num_kept + 1) // 2)
    num_tail = num_kept - num_head
    head = message[: offsets[num_head - 1][1]] if num_head else ""
    tail = message[offsets[len(offsets) - num_tail][0] :] if num_tail else ""
    return head + tail


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


def _num_chars(chat: Chat) -> int:
    return sum(len(turn["content"]) for turn in chat.turns)


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
