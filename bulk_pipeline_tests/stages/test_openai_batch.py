"""Batch files of OpenAI's: its own package's requests in, results that it can read out."""

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion, completion_create_params
from openai.types.chat import ChatCompletion
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import TypeAdapter

from bulk_pipeline.spec import FilesSource
from bulk_pipeline.stages.exporters import EXPORTERS
from bulk_pipeline.stages.formats.openai_batch import (
    BOOKKEEPING,
    CHAT,
    COLUMNS,
    OFF_VALUES,
    SETTING_COLUMNS,
    TEXT,
    read_request,
)
from bulk_pipeline.stages.ingest import ingest_partition
from bulk_pipeline.stages.sources import FilesReader, SourceFile
from bulk_pipeline.storage.schemas import RAW_DATASET
from bulk_pipeline_tests.factories import KEY, make_spec, make_store, read_rows

CHAT_REQUEST = TypeAdapter(chat_create_params.CompletionCreateParamsNonStreaming)
TEXT_REQUEST = TypeAdapter(completion_create_params.CompletionCreateParamsNonStreaming)
MESSAGES = [{"role": "user", "content": "Hello"}]
PLACE = "line 1 of x.jsonl"


def chat(custom_id: Any = "a", **body: Any) -> dict[str, Any]:
    """A line for the chat endpoint."""
    body = {"model": "gpt-4o-mini", "messages": MESSAGES} | body
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def text(custom_id: Any = "a", **body: Any) -> dict[str, Any]:
    """A line for the completions endpoint."""
    body = {"model": "davinci-002", "prompt": "Once"} | body
    return {"custom_id": custom_id, "method": "POST", "url": TEXT, "body": body}


def read(request: Any) -> tuple[dict[str, Any], str | None]:
    """The columns that the request fills, and its error."""
    row, error = read_request(json.dumps(request).encode(), PLACE)
    assert list(row) == list(COLUMNS)
    return {name: value for name, value in row.items() if value is not None}, error


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    return path


CHAT_FIELDS = [
    ({"temperature": 0.5}, {"temperature": 0.5}),
    ({"top_p": 1}, {"top_p": 1.0}),
    ({"frequency_penalty": 0.5}, {"frequency_penalty": 0.5}),
    ({"presence_penalty": -1}, {"presence_penalty": -1.0}),
    ({"max_tokens": 5}, {"max_new_tokens": 5}),
    ({"max_completion_tokens": 5}, {"max_new_tokens": 5}),
    ({"max_tokens": 5, "max_completion_tokens": 5}, {"max_new_tokens": 5}),
    ({"stop": "END"}, {"stop": ["END"]}),
    ({"stop": ["a", "b"]}, {"stop": ["a", "b"]}),
    ({"seed": 7}, {"seed": 7}),
    ({"n": 3}, {"n": 3}),
    ({"logit_bias": {"50256": -100}}, {"logit_bias": '{"50256": -100.0}'}),
    ({"logit_bias": {}}, {}),
    ({"logprobs": True}, {"logprobs": 0}),
    ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
    ({"logprobs": False}, {}),
    ({"response_format": {"type": "text"}}, {}),
    (
        {"response_format": {"type": "json_object"}},
        {"structured_output": '{"json_schema": {"type": "object"}}'},
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "array"}, "strict": True},
            }
        },
        {"structured_output": '{"json_schema": {"type": "array"}}'},
    ),
    ({"user": "me", "metadata": {"job": "1"}, "store": True, "service_tier": "flex"}, {}),
    ({"stream": False, "tools": [], "modalities": ["text"], "tool_choice": "none"}, {}),
    ({"temperature": None, "tools": None, "n": None}, {}),
]


@pytest.mark.parametrize(("body", "columns"), CHAT_FIELDS, ids=str)
def test_a_body_field_becomes_a_column(body, columns):
    request = chat(**body)
    CHAT_REQUEST.validate_python({k: v for k, v in request["body"].items() if v is not None})
    row, error = read(request)
    assert error is None
    assert row == {
        "custom_id": "a",
        "url": CHAT,
        "model": "gpt-4o-mini",
        "messages": MESSAGES,
        **columns,
    }


@pytest.mark.parametrize(
    ("body", "columns"),
    [
        ({"prompt": ["Twice"]}, {"prompt": "Twice"}),
        ({"logprobs": 2}, {"logprobs": 2}),
        ({"echo": False, "suffix": "", "best_of": 1}, {}),
        ({"n": 2, "best_of": 2, "max_tokens": 9}, {"n": 2, "max_new_tokens": 9}),
    ],
    ids=str,
)
def test_a_field_of_the_text_endpoint_becomes_a_column(body, columns):
    request = text(**body)
    TEXT_REQUEST.validate_python(request["body"])
    row, error = read(request)
    assert error is None
    fixed = {"custom_id": "a", "url": TEXT, "model": "davinci-002", "prompt": "Once"}
    assert row == fixed | columns


def test_settings_that_vllm_adds_are_known():
    row, error = read(chat(top_k=-1, min_p=0.1, repetition_penalty=1.1, min_tokens=2))
    assert error is None
    assert {name: row[name] for name in ("top_k", "min_p", "repetition_penalty")} == {
        "top_k": 0,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
    }
    assert row["min_new_tokens"] == 2


def test_text_parts_are_lines_of_one_text():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    row, error = read(chat(messages=[{"role": "developer", "content": parts}, *MESSAGES]))
    assert error is None
    assert row["messages"][0] == {"role": "developer", "content": "one\ntwo"}


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (chat(tools=[{"type": "function"}]), "body.tools is not supported; remove it"),
        (chat(stream=True), "body.stream is not supported"),
        (chat(reasoning_effort="low"), "body.reasoning_effort is not supported"),
        (chat(parallel_tool_calls=True), "body.parallel_tool_calls is not supported"),
        (chat(temprature=1), "body.temprature is not supported"),
        (chat(temperature="hot"), "body.temperature should be a valid number"),
        (chat(temperature=float("nan")), "body.temperature should be a finite number"),
        (chat(n=True), "body.n should be a valid integer"),
        (chat(seed=2**64), "body.seed should be less than"),
        (chat(stop=[1]), "body.stop.0 should be a valid string"),
        (chat(max_tokens=1, max_completion_tokens=2), "max_completion_tokens differ; give one"),
        (chat(top_logprobs=2), "body.top_logprobs needs body.logprobs to be true"),
        (chat(response_format={"type": "json_schema"}), "response_format.json_schema is missing"),
        (chat(messages=None), "body.messages is missing"),
        (chat(messages=[{"role": "user"}]), "body.messages.0.content is missing"),
        (chat(messages=[{"role": "user", "content": [IMAGE]}]), "content must be text, not images"),
        (chat(messages=[MESSAGES[0] | {"name": "Bo"}]), "body.messages.0.name is not supported"),
        (text(prompt=[1, 2]), "body.prompt must be one text; token ids"),
        (text(prompt=["a", "b"]), "body.prompt must be one text"),
        (text(echo=True), "body.echo is not supported"),
        (text(best_of=3), "body.best_of must equal body.n"),
        (text(messages=MESSAGES), "body.messages is not supported"),
        (chat() | {"url": "/v1/embeddings"}, f"url must be {CHAT} or {TEXT}"),
        (chat() | {"method": "GET"}, "method must be POST"),
        (chat() | {"body": "x"}, "body must be an object"),
        ({"custom_id": "a"}, "method must be POST"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_answered_is_a_row_with_the_reason(request_, reason):
    row, error = read(request_)
    assert error is not None
    assert reason in error
    assert row["custom_id"] == "a"
    assert not row.keys() & {"messages", "prompt", *SETTING_COLUMNS}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"custom_id": "a", "meth', "not valid JSON"),
        (b"[1]", "must be a JSON object, got a list"),
        (b"{}", "custom_id must be text that is not empty"),
        (json.dumps(chat(7)).encode(), "custom_id must be text that is not empty"),
        (json.dumps(chat("")).encode(), "custom_id must be text that is not empty"),
    ],
)
def test_a_line_without_usable_custom_id_is_named_by_its_place(line, reason):
    row, error = read_request(line, PLACE)
    assert row["custom_id"] == PLACE
    assert reason in (error or "")


def test_all_that_is_wrong_is_said():
    _, error = read(chat(tools=[1], temperature="hot"))
    assert "body.tools" in error
    assert "body.temperature" in error


# Fields of OpenAI's that a line may not use; one that its package adds must be decided on.
REFUSED = {
    *("audio", "function_call", "moderation", "parallel_tool_calls", "prediction"),
    *("reasoning_effort", "stream_options", "verbosity", "web_search_options"),
}


@pytest.mark.parametrize(
    ("params", "make"),
    [
        (chat_create_params.CompletionCreateParamsNonStreaming, chat),
        (completion_create_params.CompletionCreateParamsNonStreaming, text),
    ],
    ids=["chat", "text"],
)
def test_every_field_of_the_package_is_known_or_refused(params, make):
    for field in params.__annotations__.keys() - BOOKKEEPING - OFF_VALUES.keys():
        _, error = read(make(**{field: object_of_no_type()}))
        refused = f"body.{field} is not supported; remove it" in (error or "")
        assert refused == (field in REFUSED), field


def object_of_no_type() -> dict[str, Any]:
    return {"no": ["type"]}


@given(st.lists(st.binary(max_size=60).filter(lambda b: b"\n" not in b and not b.isspace() and b)))
@settings(max_examples=50, deadline=None)
def test_each_line_is_a_row_whatever_it_holds(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("any") / "x.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines))
    source = FilesSource(path=str(path), format="openai_batch")
    reader = FilesReader(source, [SourceFile(str(path), path.name)])
    batches = list(reader.batches())
    assert sum(map(len, batches)) == reader.num_rows(reader.files[0]) == len(lines)
    assert sum(len(batch.errors) for batch in batches) == len(lines)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


FLOATS = {"temperature", "top_p", "min_p"} | {n for n in SETTING_COLUMNS if "penalty" in n}
TEXTS = {"custom_id", "url", "model", "prompt", "logit_bias", "structured_output"}
FIELDS = sorted(
    {"top_k", "min_p", "repetition_penalty", "min_tokens", "no_field"}
    | chat_create_params.CompletionCreateParamsNonStreaming.__annotations__.keys()
)


@given(st.sampled_from(FIELDS), json_values)
@settings(max_examples=100, deadline=None)
def test_a_value_of_any_kind_is_of_its_columns_type_or_an_error(field, value):
    row, error = read(chat(**{field: value}))
    assert error is not None or row["messages"] is not None
    for name, found in row.items():
        kind = float if name in FLOATS else str if name in TEXTS else int
        kind = list if name in ("messages", "stop") else kind
        assert type(found) is kind, name
        assert kind is not int or -(2**63) <= found < 2**63, name


def test_ids_are_the_custom_ids(tmp_path):
    lines = [chat("b"), '{"torn', chat("a", tools=[1]), chat("c", max_tokens=3, seed=1)]
    path = write(tmp_path / "requests.jsonl", lines)
    spec = make_spec(
        tmp_path,
        source={"path": str(path), "format": "openai_batch"},
        prompt={"messages_column": "messages"},
    )
    store = make_store(spec)
    ingest_partition(spec, store, KEY)
    rows = read_rows(store, RAW_DATASET)
    assert [row["row_id"] for row in rows] == ["b", "line 2 of requests.jsonl", "a", "c"]
    errors = [row["row_error"] for row in rows]
    assert errors[0] is None
    assert errors[1].startswith("line 2 of requests.jsonl: not valid JSON")
    assert errors[2] == "line 3 of requests.jsonl: body.tools is not supported; remove it"
    assert [row["source_max_new_tokens"] for row in rows] == [None, None, None, 3]


def test_custom_ids_that_come_twice_are_listed(tmp_path):
    path = write(tmp_path / "x.jsonl", [chat("a"), chat("b"), chat("a"), chat("b"), chat("c")])
    spec = make_spec(tmp_path, source={"path": str(path), "format": "openai_batch"})
    spec = spec.model_copy(update={"prompt": spec.prompt.model_copy(update={"column": "url"})})
    with pytest.raises(ValueError, match=r"'custom_id' must be unique.*2 values.*'a', 'b'"):
        ingest_partition(spec, make_store(spec), KEY)


@pytest.mark.parametrize(
    ("first", "is_batch"),
    [
        (chat(), True),
        (text(), True),
        ({"custom_id": "a", "text": "x"}, False),
        ({"question": json.dumps(chat())}, False),
    ],
    ids=["chat", "text", "a custom_id alone", "a request within a text"],
)
def test_a_batch_file_is_found_by_its_first_line(tmp_path, first, is_batch):
    path = write(tmp_path / "x.jsonl", ["", " ", first, first])
    reader = FilesReader(FilesSource(path=str(path)), [SourceFile(str(path), path.name)])
    (batch,) = reader.batches()
    assert (list(batch.rows[0]) == list(COLUMNS)) == is_batch
    assert len(batch) == 2
    assert reader.inputs["files"][0]["blake2b"] is not None


def test_other_formats_are_not_looked_into(tmp_path):
    path = write(tmp_path / "x.jsonl", [chat()])
    source = FilesSource(path=str(path), format="jsonl")
    (batch,) = FilesReader(source, [SourceFile(str(path), path.name)]).batches()
    assert batch.rows == [chat()]


# Results

RUNS = {"runs": [{"began": 1000.5, "seconds": 7.0, "settings": {"model": "toy-llama"}}]}


def answer(index: int = 0, **changes: Any) -> dict[str, Any]:
    """A row of the output table."""
    return {
        "custom_id": f"id-{index}",
        "url": CHAT,
        "model": "gpt-4o-mini",
        "row_id": f"row-{index}",
        "row_index": index,
        "sample_index": 0,
        "turn": 0,
        "status": "stop",
        "completion": f"answer {index}",
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "request_key": f"key-{index}",
        "error": None,
    } | changes


PIECES = [b"</s>", b"Hi", b" there", b"\xf0\x9f\xa6", b"\x9c", b"!"]  # by token id


def export(*tables: list[dict[str, Any]], meta: Any = RUNS) -> list[dict[str, Any]]:
    """The result lines of some tables."""
    file = io.BytesIO()
    pieces = lambda ids: [PIECES[id_] for id_ in ids]  # noqa: E731
    with EXPORTERS["openai_batch"](file, pieces) as write_table:
        for rows in tables:
            write_table(pa.Table.from_pylist(rows), meta)
    return [json.loads(line) for line in file.getvalue().splitlines()]


def test_a_result_is_what_the_package_reads():
    (line,) = export([answer(), answer(sample_index=1, status="length", completion="é")])
    assert line.keys() == {"id", "custom_id", "response", "error"}
    assert (line["custom_id"], line["error"]) == ("id-0", None)
    response = line["response"]
    assert response.keys() == {"status_code", "request_id", "body"}
    assert response["status_code"] == 200
    completion = ChatCompletion.model_validate(response["body"], strict=True)
    assert (completion.created, completion.model) == (1007, "toy-llama")
    found = [(c.index, c.message.content, c.finish_reason) for c in completion.choices]
    assert found == [(0, "answer 0", "stop"), (1, "é", "length")]
    usage = completion.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 4, 9)


def test_the_text_endpoint_gets_its_own_object():
    (line,) = export([answer(url=TEXT, status="loop")])
    completion = Completion.model_validate(line["response"]["body"], strict=True)
    (choice,) = completion.choices
    assert (choice.text, choice.finish_reason) == ("answer 0", "length")


@pytest.mark.parametrize(
    ("status", "code"),
    [
        ("too_long", "context_length_exceeded"),
        ("invalid", "invalid_request"),
        ("empty", "empty_prompt"),
        ("error", "server_error"),
    ],
)
def test_a_row_without_answer_is_an_error_object(status, code):
    (line,) = export([answer(status=status, completion=None, error="the reason")])
    assert line["response"] is None
    assert line["error"] == {"code": code, "message": "the reason"}


def test_a_row_with_a_failed_sample_is_an_error_object():
    (line,) = export([answer(), answer(sample_index=1, status="error", error="broken")])
    assert line["response"] is None
    assert line["error"]["message"] == "sample 1 of 2 (from 0): broken"


def test_of_a_row_with_several_turns_the_last_answer_is_the_choice():
    (line,) = export([answer(), answer(turn=1, completion="last", prompt_tokens=9)])
    (choice,) = line["response"]["body"]["choices"]
    assert choice["message"]["content"] == "last"


def test_the_best_of_more_samples_are_numbered_from_0():
    (line,) = export([answer(sample_index=1), answer(sample_index=4)])
    assert [choice["index"] for choice in line["response"]["body"]["choices"]] == [0, 1]


def test_lines_are_in_the_order_of_the_input_wherever_tables_are_cut():
    rows = [answer(i, sample_index=s) for i in range(4) for s in range(3)]
    whole = export(rows)
    assert [line["custom_id"] for line in whole] == [f"id-{i}" for i in range(4)]
    assert [len(line["response"]["body"]["choices"]) for line in whole] == [3] * 4
    assert export(*([row] for row in rows)) == whole
    assert len({line["id"] for line in whole}) == 4


def test_partitions_of_one_row_each_are_lines_of_their_own():
    lines = export([answer(0, custom_id="a")], [answer(0, custom_id="b")])
    assert [line["custom_id"] for line in lines] == ["a", "b"]


def test_any_dataset_can_be_exported_so():
    row = {name: value for name, value in answer().items() if name not in ("custom_id", "url")}
    (line,) = export([row])
    assert line["custom_id"] == "row-0"
    ChatCompletion.model_validate(line["response"]["body"])


def test_the_model_is_the_one_asked_for_where_no_run_is_known():
    (line,) = export([answer()], meta={})
    assert line["response"]["body"]["model"] == "gpt-4o-mini"


SCORED = {
    "completion": "Hi 🦜",
    "completion_ids": [1, 3, 4, 0],
    "logprobs": [-0.5, -1.0, 0.0, -2.0],
    "top_logprobs": [
        [{"token_id": id_, "logprob": logprob}, {"token_id": 5, "logprob": -3.0}]
        for id_, logprob in [(1, -0.5), (3, -1.0), (4, 0.0), (2, -0.25)]
    ],
}


def test_log_probabilities_of_a_chat():
    (line,) = export([answer(**SCORED)])
    completion = ChatCompletion.model_validate(line["response"]["body"], strict=True)
    tokens = completion.choices[0].logprobs.content
    assert [token.token for token in tokens] == ["Hi", r"bytes:\xf0\x9f\xa6", r"bytes:\x9c", "</s>"]
    assert [token.logprob for token in tokens] == SCORED["logprobs"]
    assert bytes(b for token in tokens[:-1] for b in token.bytes) == "Hi🦜".encode()
    best = [[(each.token, each.logprob) for each in token.top_logprobs] for token in tokens]
    assert best[0] == [("Hi", -0.5), ("!", -3.0)]
    assert best[3] == [(" there", -0.25), ("!", -3.0)]


def test_log_probabilities_of_a_text():
    (line,) = export([answer(url=TEXT, **SCORED)])
    completion = Completion.model_validate(line["response"]["body"], strict=True)
    logprobs = completion.choices[0].logprobs
    assert logprobs.tokens == ["Hi", r"bytes:\xf0\x9f\xa6", r"bytes:\x9c", "</s>"]
    assert logprobs.token_logprobs == SCORED["logprobs"]
    assert logprobs.text_offset == [0, 2, 2, 3]
    assert logprobs.top_logprobs[3] == {" there": -0.25, "!": -3.0}


@pytest.mark.parametrize("url", [CHAT, TEXT])
def test_without_alternatives_there_are_the_chosen_tokens(url):
    (line,) = export([answer(url=url, **SCORED | {"top_logprobs": None})])
    logprobs = line["response"]["body"]["choices"][0]["logprobs"]
    if url == TEXT:
        assert logprobs["top_logprobs"] is None
    else:
        assert [token["top_logprobs"] for token in logprobs["content"]] == [[]] * 4


def test_thoughts_stand_beside_the_answer():
    (line,) = export([answer(reasoning="Hm.")])
    completion = ChatCompletion.model_validate(line["response"]["body"])
    assert completion.choices[0].message.reasoning_content == "Hm."


def test_no_rows_are_no_lines():
    assert export() == []
