"""What a user may configure, each field described: the one source for YAML, Python and the docs.

Unknown keys are refused. Paths are resolved with `BulkInferenceSpec.resolve_paths`.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from bulk_pipeline.generator_spec import PAGE_TOKENS as PAGE_TOKENS
from bulk_pipeline.generator_spec import GeneratorSettings as GeneratorSettings
from bulk_pipeline.sampling_spec import NOT_DONE, OTHER_NAMES, Settings
from bulk_pipeline.sampling_spec import SamplingSpec as SamplingSpec

FAMILIES = ("llama2", "llama3", "chatml", "mistral", "gemma", "phi3", "alpaca", "vicuna", "raw")


class _Source(Settings):
    id_column: str | None = Field(
        None,
        description="Column that identifies a row, unique within a partition. "
        "Off (null): the row id is a hash of `id_columns`; in files of the format openai_batch it "
        "is their custom_id.",
    )
    id_columns: list[str] | None = Field(
        None,
        description="Columns hashed into the row id where there is no `id_column`. "
        "Default (null): the columns that the prompt and sampling.from_columns read.",
    )
    limit: int | None = Field(
        None,
        ge=1,
        description="Read at most this many rows of a partition, for a trial. Off: null.",
    )
    deps: list[str] = Field(
        default_factory=list,
        description="Keys of the assets that write the source, such as tickets or crm/tickets; "
        "Dagster shows them upstream, and in one run makes them first. Off: empty.",
    )


class FilesSource(_Source):
    """Rows from files: one input row a JSON line, CSV line, Parquet row or line of text."""

    type: Literal["files"] = Field("files", description="Rows come from files.")
    path: str | list[str] = Field(
        description="File, folder or glob, or a list of them; local, on object storage such as "
        "s3://bucket/*.jsonl, or another URL that fsspec knows. Relative paths start at the "
        "project's folder."
    )
    format: Literal["auto", "jsonl", "json", "csv", "tsv", "parquet", "text", "openai_batch"] = (
        Field(
            "auto",
            description="File format; auto takes it from the file's name, a .gz or .zst ending "
            "apart, and knows a JSONL file whose first line is a request of OpenAI's batch API. A "
            "text file has one prompt a line, in the column `text`. Values of CSV and TSV stay "
            "text.",
        )
    )
    storage_options: dict[str, Any] = Field(
        default_factory=dict,
        description="Options for object storage, such as endpoint and region, or for another of "
        "fsspec's file systems. Default: none, the environment's count.",
    )

    @model_validator(mode="before")
    @classmethod
    def _batch_files_have_ids(cls, data: Any) -> Any:
        is_batch = isinstance(data, dict) and data.get("format") == "openai_batch"
        if is_batch and data.get("id_column") is None and data.get("id_columns") is None:
            return {**data, "id_column": "custom_id"}
        return data


class HuggingFaceSource(_Source):
    """Rows from a Hugging Face dataset: a hub id, or a folder written by `save_to_disk`."""

    type: Literal["huggingface"] = Field(description="Rows come from a Hugging Face dataset.")
    dataset: str = Field(description="Hub id, or a folder written by `save_to_disk`.")
    config: str | None = Field(None, description="Configuration (subset) name. Off: null.")
    split: str = Field("train", description="Split to read.")
    revision: str | None = Field(None, description="Branch, tag or commit. Default: the newest.")
    streaming: bool = Field(
        False, description="Read from the hub while running instead of downloading first."
    )


class PartitionsSpec(Settings):
    """How the dataset is cut into Dagster partitions."""

    by: Literal["file", "folder", "rows", "none"] = Field(
        "none",
        description="One partition a file, a folder, `rows` rows, or one for everything (`all`). "
        "A Hugging Face dataset can be cut by rows or not at all.",
    )
    rows: int = Field(
        100_000, ge=1, description="Rows in a partition, where `by` is rows; 1 or more."
    )
    max_per_run: int | None = Field(
        None,
        ge=1,
        description="Most partitions in one run of a backfill. Default (null): all of them, so "
        "that the model is loaded once.",
    )
    slices: int = Field(
        1,
        ge=1,
        le=1024,
        description="Slices in which a partition is answered, each in a step of its own that loads "
        "the model: for partitions that one GPU takes long for, at most as many as there are GPUs. "
        "1 to 1024. Off: 1.",
    )


class AutomationSpec(Settings):
    """What runs by itself."""

    mode: Literal["none", "sensor", "conditions"] = Field(
        "sensor",
        description="Who runs new partitions: a sensor that asks for one run over them, or "
        "Dagster's automation conditions on the four assets, with a sensor that only registers "
        "them. Sensors are switched on in the UI. Off: none.",
    )
    sensor_seconds: int = Field(
        60, ge=1, description="Least seconds between two looks at the source; 1 or more."
    )
    settle_seconds: float = Field(
        60.0,
        ge=0,
        description="A file counts as fully written this many seconds after its last change, or "
        "if two looks at the source find it unchanged. Off: 0.",
    )
    cron: str | None = Field(
        None,
        description="When to run what is missing or stale, as a cron line such as '0 2 * * *'. "
        "The schedule is on once this is set. Off: null.",
    )
    timezone: str = Field("UTC", description="Time zone of `cron`, such as Europe/Berlin.")

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.cron is not None and self.mode == "conditions":
            raise ValueError("set cron or mode: conditions, not both; they would run things twice")
        return self


class OpTagsSpec(Settings):
    """Dagster's op tags of the four assets: what executors of other packages read."""

    raw_dataset: dict[str, Any] = Field(
        default_factory=dict, description="Tags of the step that reads the source. Off: empty."
    )
    prompts: dict[str, Any] = Field(
        default_factory=dict, description="Tags of the step that formats rows. Off: empty."
    )
    completions: dict[str, Any] = Field(
        default_factory=dict,
        description="Tags of the step that runs the model, and so where a GPU is asked for: "
        "{dagster-ray/config: {num_gpus: 1}} with Ray, {dagster-k8s/config: {container_config: "
        "{resources: {limits: {nvidia.com/gpu: 1}}}}} with Kubernetes. Off: empty.",
    )
    output: dict[str, Any] = Field(
        default_factory=dict, description="Tags of the step that joins. Off: empty."
    )


class PromptSpec(Settings):
    """How a row becomes a prompt: exactly one of the columns and `template`."""

    column: str | None = Field(
        None, description="Column that holds the user's message as text. Off: null."
    )
    messages_column: str | None = Field(
        None,
        description="Column that holds chat turns, the last one from the user: role/content "
        "(OpenAI) or from/value (ShareGPT). Off: null.",
    )
    turns_column: str | None = Field(
        None,
        description="Column that holds several turns of the user, as a list of texts or of chat "
        "turns, such as [Name a colour., Why that one?]. They are answered one after another, each "
        "with the turns and answers before it: one completion a turn. Off: null.",
    )
    template: str | None = Field(
        None,
        description="Jinja template of the user's message over the row's columns, "
        "such as '{{ question }}'. Runs in a sandbox. Off: null.",
    )
    system: str | None = Field(None, description="System prompt, as text. Off: null.")
    system_column: str | None = Field(
        None, description="Column that holds each row's system prompt. Off: null."
    )
    chat_template: str = Field(
        "model",
        description="Chat template: `model` for the model's own, a family "
        f"({', '.join(FAMILIES)}), or the path of a Jinja file.",
    )
    assistant_prefix: str = Field(
        "", description="Text that the answer starts with; it is part of the prompt. Off: empty."
    )
    too_long: Literal["error_row", "truncate_left", "truncate_right", "truncate_middle", "fail"] = (
        Field(
            "error_row",
            description="What happens to a row whose prompt and completion exceed the model's "
            "length: it gets the status too_long, its message is cut (never the template), "
            "or the partition fails.",
        )
    )
    allow_special_tokens: bool = Field(
        False,
        description="Whether text such as <|im_end|> inside a row counts as the special token; "
        "otherwise it is text.",
    )
    date: str | None = Field(
        None,
        pattern=r"^\d{4}-\d{2}-\d{2}$",
        description="Date (YYYY-MM-DD) for templates that ask for one. Default: the day a "
        "partition was first formatted.",
    )

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        ways = ("column", "messages_column", "turns_column", "template")
        given = [name for name in ways if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(
                "set exactly one of column, messages_column, turns_column and template, "
                f"got {' and '.join(given) or 'none'}"
            )
        if self.turns_column and self.too_long.startswith("truncate"):
            raise ValueError(
                f"too_long must be error_row or fail with turns_column, got {self.too_long}"
            )
        if self.system is not None and self.system_column is not None:
            raise ValueError("set system or system_column, not both")
        return self


class ReasoningSpec(Settings):
    """What surrounds a reasoning model's thoughts."""

    start: str = Field("<think>", min_length=1, description="Text that begins them.")
    end: str = Field("</think>", min_length=1, description="Text that ends them.")


class OutputSpec(Settings):
    """Where the tables are, how often results are written, and what a partition may lose."""

    root: str = Field(
        "data/bulk",
        description="Folder, or URL of object storage (s3://, gs://, az://), that holds all tables "
        "of the dataset, under its name. Relative paths start at the project's folder. What is on "
        "memory:// ends with the process.",
    )
    storage_options: dict[str, Any] = Field(
        default_factory=dict,
        description="Options for object storage, such as endpoint and region; "
        "see docs/object_storage.md. Default: none, the environment's count.",
    )
    formats: list[Literal["jsonl", "json", "csv", "openai_batch"]] = Field(
        default_factory=list,
        description="Further formats of the output table, beside Parquet; openai_batch are results "
        "as those of OpenAI's batch API. Default: none.",
    )
    reasoning: ReasoningSpec | None = Field(
        None,
        description="Put what a reasoning model thinks into a column of its own, `reasoning`, so "
        "that `completion` is the answer alone; {} or true for <think> and </think>, or other "
        "marks such as {start: '[THINK]', end: '[/THINK]'}. Thoughts that were cut off have no "
        "answer and the status length. Off: null.",
    )
    unfold: bool = Field(
        False,
        description="Write the top-level properties of the answers, as "
        "sampling.structured_output.json_schema names them, into columns of their own: text, whole "
        "numbers, numbers and booleans by their type, others as JSON text. `parsed` says whether "
        "the answer is what the schema describes; where it is not, they are null.",
    )
    flush_rows: int = Field(
        1000, ge=1, description="Write finished completions at the latest after this many rows."
    )
    flush_seconds: float = Field(
        30.0, gt=0, description="Write finished completions at the latest after this many seconds."
    )
    max_error_rate: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of requests that may end as too_long, empty, invalid or error before "
        "the partition fails, from 0 to 1. Off: 1.",
    )
    preview: bool = Field(
        True,
        description="Show up to five short rows in Dagster's metadata, and samples in the report. "
        "Off: no row text.",
    )
    price_per_hour: float | None = Field(
        None,
        ge=0,
        description="What an hour of the machine costs, in any currency; plan and report then "
        "tell costs. Off: null.",
    )

    @field_validator("reasoning", mode="before")
    @classmethod
    def _switch(cls, value: Any) -> Any:
        return {True: {}, False: None}[value] if isinstance(value, bool) else value


class BulkInferenceSpec(Settings):
    """One dataset: where its rows come from, what is asked, how, and where the answers go."""

    name: str = Field(
        pattern=r"^[A-Za-z][A-Za-z0-9_]{0,63}$",
        description="Name of the dataset: its asset group, and its folder under output.root. "
        "Letters, digits and _.",
    )
    source: Annotated[FilesSource | HuggingFaceSource, Field(discriminator="type")] = Field(
        description="Where the rows come from."
    )
    prompt: PromptSpec = Field(description="How a row becomes a prompt.")
    sampling: SamplingSpec = Field(
        default_factory=SamplingSpec, description="How completions are sampled."
    )
    generator: GeneratorSettings | None = Field(
        None, description="The model, for this dataset alone. Off: null, with generator_resource."
    )
    generator_resource: str | None = Field(
        None,
        description="Key of an ExLlamaV2Resource that several datasets share, in place of "
        "`generator`. Off: null.",
    )
    partitions: PartitionsSpec = Field(
        default_factory=PartitionsSpec,
        description="How the dataset is cut into partitions.",
    )
    automation: AutomationSpec = Field(
        default_factory=AutomationSpec, description="What runs by itself, and when."
    )
    op_tags: OpTagsSpec = Field(
        default_factory=OpTagsSpec,
        description="What a step asks of the executor that places it.",
    )
    output: OutputSpec = Field(
        default_factory=OutputSpec,
        description="Where the tables are and how they are written.",
    )

    @model_validator(mode="before")
    @classmethod
    def _default_source_type(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(source := data.get("source"), dict):
            data = {**data, "source": {"type": "files", **source}}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.generator is None) == (self.generator_resource is None):
            raise ValueError("set exactly one of generator and generator_resource")
        if isinstance(self.source, HuggingFaceSource) and self.partitions.by in ("file", "folder"):
            raise ValueError(
                "partitions.by must be rows or none for a Hugging Face dataset, "
                f"got {self.partitions.by}"
            )
        adapter = self.sampling.adapter
        if self.generator and adapter is not None and adapter not in self.generator.adapters:
            known = ", ".join(self.generator.adapters) or "none"
            raise ValueError(
                f"sampling.adapter must be one of generator.adapters ({known}), got {adapter!r}; "
                "add it there, or correct the name"
            )
        structured = self.sampling.structured_output
        if self.output.unfold and (structured is None or structured.json_schema is None):
            raise ValueError(
                "output.unfold needs sampling.structured_output.json_schema, which names the "
                "columns; set that, or remove output.unfold"
            )
        if self.sampling.may_budget_thoughts and self.output.reasoning is None:
            raise ValueError(
                "sampling.thinking_token_budget needs output.reasoning, which has the marks of "
                "thoughts; set output.reasoning to true"
            )
        if self.prompt.turns_column and self.sampling.prompt_logprobs:
            raise ValueError(
                "sampling.prompt_logprobs scores prompts, and those of later turns hold answers of "
                "the model; set prompt.messages_column in place of prompt.turns_column"
            )
        return self

    def resolve_paths(self, base: Path) -> Self:
        """Return the spec with every relative local path made absolute, starting at `base`."""

        def absolute(path: str) -> str:
            return path if "://" in path or "::" in path else str(base / path)

        def model_path(model: str) -> str:
            is_hub_id = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+|[\w-][\w.-]*", model)
            return model if is_hub_id and not (base / model).is_dir() else absolute(model)

        changes: dict[str, Any] = {
            "output": self.output.model_copy(update={"root": absolute(self.output.root)})
        }
        if isinstance(self.source, FilesSource):
            paths = [self.source.path] if isinstance(self.source.path, str) else self.source.path
            changes["source"] = self.source.model_copy(
                update={"path": [absolute(path) for path in paths]}
            )
        elif (base / self.source.dataset).is_dir():
            changes["source"] = self.source.model_copy(
                update={"dataset": absolute(self.source.dataset)}
            )
        structured = self.sampling.structured_output
        if structured is not None and isinstance(structured.json_schema, str):
            path = absolute(structured.json_schema)
            structured = structured.model_copy(update={"json_schema": path})
            changes["sampling"] = self.sampling.model_copy(update={"structured_output": structured})
        if self.prompt.chat_template not in ("model", *FAMILIES):
            changes["prompt"] = self.prompt.model_copy(
                update={"chat_template": absolute(self.prompt.chat_template)}
            )
        if self.generator is not None:
            draft = self.generator.draft_model
            changes["generator"] = self.generator.model_copy(
                update={
                    "model": model_path(self.generator.model),
                    "draft_model": draft and model_path(draft),
                    "adapters": {
                        name: model_path(where) for name, where in self.generator.adapters.items()
                    },
                }
            )
        return self.model_copy(update=changes)


def load_spec(data: dict[str, Any]) -> BulkInferenceSpec:
    """Validate a spec given as plain values.

    Raises
    ------
    ValueError
        One line a problem: the field as the user wrote it, the rule, and the value.
    """
    try:
        return BulkInferenceSpec.model_validate(data)
    except ValidationError as error:
        raise ValueError("\n".join(map(_problem, error.errors()))) from None


def change_sampling(sampling: SamplingSpec, changes: dict[str, Any]) -> SamplingSpec:
    """The settings with some values replaced.

    Raises
    ------
    ValueError
        One line a problem, as `load_spec` has them.
    """
    try:
        return SamplingSpec.model_validate(sampling.model_dump() | changes)
    except ValidationError as error:
        problems = ({**each, "loc": ("sampling", *each["loc"])} for each in error.errors())
        raise ValueError("\n".join(map(_problem, problems))) from None


def _problem(error: Any) -> str:
    field = ".".join(str(part) for part in error["loc"] if part not in ("files", "huggingface"))
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{field}: {message}" if field else message
    if error["type"] == "extra_forbidden":
        return f"{field} {_unknown_setting(error['loc'])}"
    if error["type"] == "missing":
        return f"{field} is missing; set it"
    return f"{field}: {message[0].lower()}{message[1:]}, got {error['input']!r}"


def _unknown_setting(loc: tuple[str | int, ...]) -> str:
    name = str(loc[-1])
    if loc[0] == "sampling" and name in OTHER_NAMES:
        return f"is called {OTHER_NAMES[name]} here; rename it"
    if loc[0] == "sampling" and NOT_DONE.fullmatch(name):
        return f"is not supported; remove it (supported: {', '.join(SamplingSpec.model_fields)})"
    return "is not a setting; remove it or correct its name"
