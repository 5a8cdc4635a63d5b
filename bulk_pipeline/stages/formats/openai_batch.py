"""Request files of OpenAI's batch API: one line is one row, whatever is wrong with it.

A line's ``body`` becomes columns under the names of our settings, the same ones for every line,
null where the line says nothing. A line that cannot be answered as it stands is a row that says
why.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from bulk_pipeline.stages.formats.batch import Batch, in_batches
from bulk_pipeline.stages.formats.json import json_lines, parse_row

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"

# A setting and the column that holds its values.
SETTING_COLUMNS = {
    name: name
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "max_new_tokens",
        "min_new_tokens",
        "seed",
        "n",
        "stop",
        "logprobs",
        "structured_output",
    )
}
COLUMNS = ("custom_id", "url", "model", "messages", "prompt", *SETTING_COLUMNS)
# Those that a body has under the same name, whatever the endpoint.
SAME_NAMES = (
    "model",
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "n",
    "stop",
)
# They do not change the answer.
BOOKKEEPING = {
    "metadata",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
# What is not supported may still be said to be off.
OFF_VALUES: dict[str, Any] = {
    "echo": False,
    "functions": [],
    "modalities": ["text"],
    "stream": False,
    "suffix": "",
    "tool_choice": "none",
    "tools": [],
}


def find_batch(lines: Iterable[bytes]) -> tuple[bool, Iterable[bytes]]:
    """Whether the first line is a batch request; also the lines again, from the first."""
    lines = iter(lines)
    head: list[bytes] = []
    for line in lines:
        head.append(line)
        if not line.isspace():
            break
    return bool(head) and _is_request(head[-1]), chain(head, lines)


def _is_request(line: bytes) -> bool:
    try:
        row, _ = parse_row(line)
    except (ValueError, RecursionError):
        return False
    return row.keys() >= {"custom_id", "method", "url", "body"}


def read_openai_batch(
    stream: Iterable[bytes], path: str, start: int, stop: int | None
) -> Iterator[Batch]:
    """Yield the lines `start` to `stop` as rows with the columns `COLUMNS`."""
    file = path.rpartition("/")[2]
    lines = islice(json_lines(stream), start, stop)
    for batch in in_batches((item, len(item[1])) for item in lines):
        rows: list[dict[str, Any]] = []
        errors: dict[int, str] = {}
        for number, line in batch:
            place = f"line {number} of {file}"
            row, error = read_request(line, place)
            if error:
                errors[len(rows)] = f"{place}: {error}"
            rows.append(row)
        yield Batch(rows, errors)


def read_request(line: bytes, place: str) -> tuple[dict[str, Any], str | None]:
    """Read one request; also why it cannot be answered, or None.

    `place` identifies a line that has no usable custom_id.
    """
    row = dict.fromkeys(COLUMNS) | {"custom_id": place}
    try:
        request, error = parse_row(line)
    except (ValueError, RecursionError) as problem:
        return row, str(problem)
    custom_id, url = request.get("custom_id"), request.get("url")
    row["url"] = url if isinstance(url, str) else None
    if not isinstance(custom_id, str) or not custom_id:
        return row, "custom_id must be text that is not empty"
    row["custom_id"] = custom_id
    try:
        return row | _columns(request), error
    except ValidationError as problems:
        return row, error or "; ".join(map(_problem, problems.errors()))
    except ValueError as problem:
        return row, error or str(problem)


def _columns(request: dict[str, Any]) -> dict[str, Any]:
    """The columns that a request's body fills."""
    method, url, body = (request.get(name) for name in ("method", "url", "body"))
    if method != "POST":
        raise ValueError("method must be POST")
    if url not in (CHAT, TEXT):
        raise ValueError(f"url must be {CHAT} or {TEXT}")
    if not isinstance(body, dict):
        raise ValueError("body must be an object")
    body = {name: value for name, value in body.items() if not _is_without_effect(name, value)}
    if url == CHAT:
        return _ChatBody.model_validate(body).columns()
    return _TextBody.model_validate(body).columns()


def _is_without_effect(name: str, value: Any) -> bool:
    return value is None or name in BOOKKEEPING or OFF_VALUES.get(name) == value


def _problem(error: Any) -> str:
    field = ".".join(
        f"{part:.40}" if isinstance(part, str) else str(part) for part in ("body", *error["loc"])
    )
    if error["type"] == "extra_forbidden":
        return f"{field} is not supported; remove it"
    if error["type"] == "missing":
        return f"{field} is missing"
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{field} {message}"


def _text(content: Any) -> str:
    """A message's text; of several text parts, a line each."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError("must be text or a list of text parts")
    if not all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    ):
        raise ValueError("must be text, not images or the like")
    return "\n".join(part["text"] for part in content)


def _one_prompt(prompt: Any) -> str:
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise ValueError("must be one text; token ids and several prompts are not supported")
    return prompt


def _texts(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


def _without_nulls(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: item for name, item in value.items() if item is not None}


_Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # what a column holds


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Message(_Strict):
    role: str
    content: Annotated[str, BeforeValidator(_text)]


class _Schema(_Strict):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class _ResponseFormat(_Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: Annotated[_Schema | None, BeforeValidator(_without_nulls)] = None


class _Body(_Strict):
    """What both endpoints know; the last five are vLLM's."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: _Int | None = None
    seed: _Int | None = None
    n: _Int | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_texts)] = None
    top_k: _Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: _Int | None = None

    def columns(self) -> dict[str, Any]:
        """The values under the columns' names."""
        values = vars(self)  # quicker than a dump of the model
        return {name: values[name] for name in SAME_NAMES} | {
            "max_new_tokens": self.max_tokens,
            "min_new_tokens": self.min_tokens,
            "logit_bias": json.dumps(self.logit_bias) if self.logit_bias else None,
            "top_k": 0 if self.top_k == -1 else self.top_k,  # -1 is off there, 0 is here
        }


class _ChatBody(_Body):
    messages: list[Annotated[_Message, BeforeValidator(_without_nulls)]]
    max_completion_tokens: _Int | None = None
    logprobs: bool | None = None
    top_logprobs: _Int | None = None
    response_format: Annotated[_ResponseFormat | None, BeforeValidator(_without_nulls)] = None

    def columns(self) -> dict[str, Any]:
        """The values under the columns' names.

        Raises
        ------
        ValueError
            If two fields contradict each other.
        """
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ValueError("body.max_tokens and body.max_completion_tokens differ; give one")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("body.top_logprobs needs body.logprobs to be true")
        return super().columns() | {
            "messages": [{"role": each.role, "content": each.content} for each in self.messages],
            "max_new_tokens": next(iter(limits), None),
            "logprobs": self.top_logprobs or 0 if self.logprobs else None,
            "structured_output": self._structured_output(),
        }

    def _structured_output(self) -> str | None:
        """The value of `sampling.structured_output`, as JSON text."""
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return json.dumps({"json_schema": {"type": "object"}})
        if wanted.json_schema is None:
            raise ValueError("body.response_format.json_schema is missing")
        return json.dumps({"json_schema": wanted.json_schema.schema_})


class _TextBody(_Body):
    prompt: Annotated[str, BeforeValidator(_one_prompt)]
    logprobs: _Int | None = None
    best_of: _Int | None = None

    def columns(self) -> dict[str, Any]:
        """The values under the columns' names.

        Raises
        ------
        ValueError
            If more samples are wanted than are returned.
        """
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("body.best_of must equal body.n; others are not supported")
        return super().columns() | {"prompt": self.prompt, "logprobs": self.logprobs}
