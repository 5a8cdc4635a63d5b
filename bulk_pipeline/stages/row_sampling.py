"""The sampling of each row: the dataset's settings, with those that the row has in its columns.

A row with a bad value raises `BadRow`. Rows with equal values share one object.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import orjson
from pydantic import ValidationError

from bulk_pipeline.engine.request import Status
from bulk_pipeline.sampling_spec import SamplingSpec, StructuredOutputSpec
from bulk_pipeline.spec import ReasoningSpec
from bulk_pipeline.stages.structured import check_structured, to_engine
from bulk_pipeline.stages.turns import BadRow, RawColumns
from bulk_pipeline.storage.schemas import SAMPLING_TYPE

MAX_HELD = 4096  # different settings held at once; more are made again
# Settings that earlier versions did not have.
LATER = {
    "logprobs",
    "prompt_logprobs",
    "best_of",
    "structured_output",
    "loop_guard",
    "allowed_token_ids",
    "bad_words",
    "banned_strings",
    "thinking_token_budget",
    "from_columns",
    "adapter",
}
TEXTS = {"stop", "bad_words", "banned_strings"}  # a text that is no JSON list is one of them
NESTED = {
    "logit_bias",
    "banned_token_ids",
    "allowed_token_ids",
    "stop_token_ids",
    "structured_output",
    "loop_guard",
}


@dataclass(frozen=True, slots=True)
class RowSampling:
    """A row's settings: `values` as the prompts table has them.

    `opened` is what they are where the prompt ends within thoughts that have a budget.
    """

    values: dict[str, Any]
    max_new_tokens: int
    num_samples: int
    opened: "RowSampling | None" = None


class SamplingReader:
    """Reads the sampling of the rows of one dataset.

    Parameters
    ----------
    sampling
        The dataset's settings, with the JSON schema in place of its file.
    columns
        What the raw table has.
    end_tokens, special_tokens
        The model's, see `resolve_sampling`.
    show_text
        Whether reasons may quote rows.
    marks
        What surrounds thoughts; needed where they have a budget.
    adapters
        Names of the adapters that there are.

    Attributes
    ----------
    names
        The raw table's column of each setting that rows have.
    default
        What rows without values of their own have.

    Raises
    ------
    ValueError
        If a column is missing, or the dataset's settings cannot work.
    """

    def __init__(
        self,
        sampling: SamplingSpec,
        columns: RawColumns,
        end_tokens: Mapping[int, str],
        special_tokens: Mapping[str, int],
        show_text: bool = True,
        marks: ReasoningSpec | None = None,
        adapters: Collection[str] = (),
    ):
        self._adapters = adapters
        self._sampling, self._columns, self._show_text = sampling, columns, show_text
        self._end_tokens, self._special_tokens = end_tokens, special_tokens
        self._marks = marks
        self.names = {
            str(setting): columns.find(f"sampling.from_columns.{setting}", name)
            for setting, name in sampling.from_columns.items()
        }
        try:
            self.default = self._resolve(sampling)
        except ValueError as error:
            raise ValueError(f"sampling.{error}") from None
        self._plain = sampling.model_dump()
        self._held: dict[str, RowSampling | str] = {}

    def read(self, row: Mapping[str, Any]) -> RowSampling:
        """A row's settings; the row's keys are the raw table's column names."""
        if not self.names:
            return self.default
        own = {setting: self._columns.value(row, name) for setting, name in self.names.items()}
        key = repr(own)  # tells 1 from 1.0 and true
        if key not in self._held:
            if len(self._held) >= MAX_HELD:
                self._held.clear()
            self._held[key] = self._made(own)
        if isinstance(found := self._held[key], str):
            raise BadRow(Status.INVALID, found)
        return found

    def _made(self, own: Mapping[str, Any]) -> RowSampling | str:
        """The settings, or what is wrong with the row's."""
        try:
            given = {name: _given(name, each) for name, each in own.items() if _is_set(each)}
            if not given:
                return self.default
            return self._resolve(SamplingSpec.model_validate(self._plain | given))
        except ValidationError as error:
            first: Any = error.errors()[0]
            return self._reason(first["loc"], first["msg"], first["input"])
        except _BadValueError as error:
            return self._reason((error.setting,), str(error), own[error.setting])
        except ValueError as error:  # of `_resolve`; it quotes values
            setting = str(error).partition(":")[0].partition(".")[0]
            rule = str(error) if self._show_text else f"{setting}: cannot be used"
            return f"{self._origin(setting)}: {rule}"

    def _reason(self, loc: tuple[str | int, ...], rule: str, value: Any) -> str:
        rule = rule.removeprefix("Value error, ")
        if not loc:  # settings that do not go together; the rule names them
            return f"sampling.from_columns: {rule}"
        field = ".".join(map(str, loc if self._show_text else loc[:1]))
        shown = f", got {value!r:.80}" if self._show_text else ""
        return f"{self._origin(str(loc[0]))}: {field}: {rule[0].lower()}{rule[1:]}{shown}"

    def _origin(self, setting: str) -> str:
        columns = {str(name): column for name, column in self._sampling.from_columns.items()}
        return f"column {columns.get(setting, setting)}"

    def _resolve(self, sampling: SamplingSpec) -> RowSampling:
        check_structured(sampling.structured_output)
        if sampling.adapter is not None and sampling.adapter not in self._adapters:
            known = ", ".join(self._adapters) or "none"
            raise ValueError(
                f"adapter: must be one of generator.adapters ({known}), got {sampling.adapter!r}"
            )
        values = resolve_sampling(sampling, self._end_tokens, self._special_tokens)
        return self._with_budget(
            RowSampling(values, sampling.max_new_tokens, sampling.num_samples),
            sampling.thinking_token_budget,
        )

    def _with_budget(self, plain: RowSampling, tokens: int | None) -> RowSampling:
        if tokens is None or self._marks is None:
            return plain
        budget = {"tokens": tokens, **self._marks.model_dump()}
        closed, opened = (
            replace(plain, values=plain.values | {"thinking": budget | {"is_open": is_open}})
            for is_open in (False, True)
        )
        return replace(closed, opened=opened)


def resolve_sampling(
    sampling: SamplingSpec, end_tokens: Mapping[int, str], special_tokens: Mapping[str, int]
) -> dict[str, Any]:
    """A row's sampling values, with all ids that end its completion.

    A special token given as a stop string would never match, since special tokens decode to
    nothing: it becomes its id. To find the best of several samples, their log-probabilities are
    asked for.
    """
    stop_ids = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(end_tokens))
    stop_ids |= {special_tokens[text] for text in sampling.stop if text in special_tokens}
    stop = [text for text in sampling.stop if text not in special_tokens]
    for text in stop:
        if inside := next((token for token in special_tokens if token in text), None):
            raise ValueError(
                f"stop: {text!r} never matches, because {inside} in it is a special "
                f"token; write {inside!r} alone"
            )
    values = sampling.model_dump(include={member.name for member in SAMPLING_TYPE})
    if sampling.best_of is not None and sampling.logprobs is None:
        values["logprobs"] = 0
    structured = to_engine(sampling.structured_output)
    return (
        values
        | _logit_bias(sampling)
        | {"stop": stop, "stop_token_ids": sorted(stop_ids)}
        | {"structured": structured and asdict(structured), "thinking": None}
    )


def sampling_inputs(sampling: SamplingSpec) -> dict[str, Any]:
    """The settings as the manifest of the prompts has them, with the schema itself.

    Settings that came later are left out where they are off, so that older prompts are not stale.
    """
    values = with_schema(sampling).model_dump(mode="json") | _logit_bias(sampling)
    off = {name for name in LATER if values[name] in (None, {}, []) or values[name] is False}
    return {name: value for name, value in values.items() if name not in off}


def with_schema(sampling: SamplingSpec) -> SamplingSpec:
    """The settings with a JSON schema in place of its file.

    Raises
    ------
    ValueError
        If the file cannot be read.
    """
    structured = sampling.structured_output
    if structured is None or not isinstance(structured.json_schema, str):
        return sampling
    return sampling.model_copy(update={"structured_output": structured.read_file()})


def _logit_bias(sampling: SamplingSpec) -> dict[str, Any]:
    """The setting as a list, which JSON and Parquet give back as it was."""
    biases = sorted(sampling.logit_bias.items())
    return {"logit_bias": [{"token_id": token, "bias": bias} for token, bias in biases]}


class _BadValueError(ValueError):
    """A value that is no setting's, before it is validated."""

    def __init__(self, setting: str, rule: str):
        super().__init__(rule)
        self.setting = setting


def _is_set(value: Any) -> bool:
    """Whether the row says anything: CSV has no null but empty text."""
    return value is not None and value != ""


def _given(setting: str, value: Any) -> Any:
    """A row's value as the settings take it."""
    if isinstance(value, bool):
        raise _BadValueError(setting, "must not be a boolean")
    if setting in TEXTS and isinstance(value, str) and not value.startswith("["):
        return [value]
    if isinstance(value, str) and (setting in NESTED or setting in TEXTS):
        value = _parsed(setting, value)
    if isinstance(value, dict):  # of a struct column, which has all rows' names
        value = {name: each for name, each in value.items() if each is not None}
    return _row_structure(value) if setting == "structured_output" else value


def _row_structure(value: Any) -> Any:
    """A row's structure: a schema is never the name of a file."""
    if isinstance(value, StructuredOutputSpec) or not isinstance(value, dict):
        return value
    schema = value.get("json_schema")
    if isinstance(schema, str):
        schema = _parsed("structured_output", schema)
    if schema is not None and not isinstance(schema, dict):
        raise _BadValueError("structured_output", "json_schema must be a JSON object")
    return value if schema is None else value | {"json_schema": schema}


def _parsed(setting: str, text: str) -> Any:
    try:
        return orjson.loads(text)
    except ValueError:
        raise _BadValueError(setting, "must be JSON") from None
