"""Settings that rows have in their columns: into the prompts table, and from there to requests."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from bulk_pipeline.engine.request import (
    LoopGuard,
    SamplingParams,
    StructuredOutput,
    ThinkingBudget,
    request_key,
)
from bulk_pipeline.sampling_spec import SamplingSpec
from bulk_pipeline.spec import load_spec
from bulk_pipeline.stages.ingest import id_columns, ingest_partition
from bulk_pipeline.stages.row_sampling import sampling_inputs
from bulk_pipeline.stages.wanted import requests_at
from bulk_pipeline.storage.schemas import PROMPTS, RAW_DATASET
from bulk_pipeline_tests.factories import KEY, make_spec, make_store
from bulk_pipeline_tests.stages.test_format import Stage, render
from bulk_pipeline_tests.toy import EOS_ID, PAD_ID, TURN_END_ID

ENDS = (EOS_ID, TURN_END_ID)
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "default": None}},
    "required": ["age"],
}


@pytest.fixture
def stage(tmp_path: Path, toy: Path) -> Stage:
    return Stage(tmp_path, toy)


def prompts(
    stage: Stage, setting: str, values: list[Any], type_: pa.DataType, **changes: Any
) -> list[dict[str, Any]]:
    """The prompts of rows that have one setting in the column `own`."""
    sampling = changes.pop("sampling", {}) | {"from_columns": {setting: "own"}}
    rows = [{"text": "Hi", "own": value} for value in values]
    fields = [("text", pa.string()), ("own", type_)]
    return stage.run(rows, fields=fields, sampling=sampling, **changes)


def requests(stage: Stage, number: int) -> list[Any]:
    return list(requests_at(stage.store.partition(PROMPTS, KEY), "model", np.arange(number)))


@pytest.mark.parametrize(
    ("setting", "type_", "value", "expected"),
    [
        ("temperature", pa.float64(), 0.25, 0.25),
        ("temperature", pa.string(), "0.25", 0.25),
        ("top_p", pa.float64(), 0.5, 0.5),
        ("top_k", pa.int64(), 7, 7),
        ("top_k", pa.float64(), 7.0, 7),
        ("min_p", pa.float64(), 0.1, 0.1),
        ("repetition_penalty", pa.float64(), 1.5, 1.5),
        ("frequency_penalty", pa.float64(), -0.5, -0.5),
        ("presence_penalty", pa.float64(), 0.5, 0.5),
        ("max_new_tokens", pa.int64(), 3, 3),
        ("min_new_tokens", pa.int64(), 3, 3),
        ("stop", pa.string(), "END", ("END",)),
        ("stop", pa.string(), '["END", "\\n"]', ("END", "\n")),
        ("stop", pa.list_(pa.string()), ["END"], ("END",)),
        ("stop_token_ids", pa.list_(pa.int64()), [9], (1, 4, 9)),
        ("banned_token_ids", pa.string(), "[9, 8]", (9, 8)),
        ("logit_bias", pa.string(), '{"9": 1.5}', ((9, 1.5),)),
        ("logit_bias", pa.struct([("9", pa.float64()), ("8", pa.float64())]), {"9": 1.5},
         ((9, 1.5),)),
        ("logprobs", pa.int64(), 0, 0),
        ("structured_output", pa.string(), '{"choice": ["a", "b"]}',
         StructuredOutput("choice", '["a", "b"]')),
        ("structured_output", pa.string(), json.dumps({"json_schema": SCHEMA}),
         StructuredOutput("json_schema", json.dumps(SCHEMA))),
        ("structured_output", pa.string(), json.dumps({"json_schema": json.dumps(SCHEMA)}),
         StructuredOutput("json_schema", json.dumps(SCHEMA))),
        ("loop_guard", pa.string(), '{"ngram": 3, "repeats": 4}', LoopGuard(3, 4)),
        ("allowed_token_ids", pa.string(), "[9, 8]", (9, 8)),
        ("bad_words", pa.string(), "sorry", ("sorry",)),
        ("bad_words", pa.list_(pa.string()), ["sorry", "[x"], ("sorry", "[x")),
        ("banned_strings", pa.string(), '["as an AI", "]"]', ("as an AI", "]")),
    ],
)  # fmt: skip
def test_a_rows_own_setting_reaches_its_request(stage, setting, type_, value, expected):
    rows = prompts(stage, setting, [value, None, value], type_)
    assert [row["status"] for row in rows] == ["ready"] * 3
    first, second, third = requests(stage, 3)
    name = "structured" if setting == "structured_output" else setting
    assert getattr(first.sampling, name) == expected
    default = SamplingParams(max_new_tokens=8, stop_token_ids=ENDS, seed=second.sampling.seed)
    assert second.sampling == default
    assert getattr(third.sampling, name) == expected
    for each in (first, second):
        assert each.key == request_key(each.input_ids, each.sampling, "model")
    if setting != "max_new_tokens":
        assert first.key != request_key(first.input_ids, default, "model")


def test_rows_may_have_seeds_and_numbers_of_samples(stage):
    rows = prompts(stage, "n", [3, None, 1], pa.int64(), sampling={"n": 2})
    assert [row["num_samples"] for row in rows] == [3, 2, 1]
    assert stage.manifest().meta["num_requests"] == 6
    rows = prompts(stage, "seed", [5, None], pa.int64(), sampling={"seed": 7})
    assert [row["sampling"]["seed"] for row in rows] == [5, 7]


def test_empty_text_is_no_value(stage):
    (row,) = prompts(stage, "temperature", [""], pa.string(), sampling={"temperature": 0.5})
    assert row["sampling"]["temperature"] == 0.5


def test_a_special_token_to_stop_at_becomes_its_id(stage):
    (row,) = prompts(stage, "stop", ["<pad>"], pa.string())
    assert (row["sampling"]["stop"], PAD_ID in row["sampling"]["stop_token_ids"]) == ([], True)


BAD = [
    ("temperature", pa.float64(), -1.0, "greater than or equal to 0, got -1.0"),
    ("temperature", pa.float64(), float("nan"), "got nan"),
    ("temperature", pa.string(), "hot", "valid number.*, got 'hot'"),
    ("temperature", pa.bool_(), True, "must not be a boolean, got True"),
    ("top_k", pa.float64(), 1.5, "valid integer.*, got 1.5"),
    ("n", pa.int64(), 0, "greater than or equal to 1, got 0"),
    ("seed", pa.int64(), -1, "greater than or equal to 0, got -1"),
    ("stop", pa.string(), "x<pad>", "stop: 'x<pad>' never matches"),
    ("stop", pa.string(), '["a', r"must be JSON, got"),
    ("logit_bias", pa.string(), "9", "valid dictionary"),
    ("logit_bias", pa.string(), '{"-9": 1}', "greater than or equal to 0"),
    ("structured_output", pa.string(), "{}", "set exactly one of json_schema, regex, choice"),
    ("structured_output", pa.string(), '{"json_schema": "secrets.json"}', "must be JSON"),
    ("structured_output", pa.string(), '{"json_schema": [1]}', "json_schema must be a JSON object"),
    ("structured_output", pa.string(), '{"json_schema": {"type": "strin"}}',
     r"structured_output.json_schema: cannot be used \(type: 'strin' is not valid"),
    ("structured_output", pa.string(), '{"regex": "a(b"}',
     "structured_output.regex: cannot be used .*unclosed group"),
    ("bad_words", pa.string(), '[""]', "bad_words.0: .*at least 1 character"),
    ("allowed_token_ids", pa.string(), "[-1]", "greater than or equal to 0, got -1"),
    ("banned_strings", pa.string(), "[1]", "banned_strings.0: .*valid string, got 1"),
    ("loop_guard", pa.string(), '{"ngram": 0, "repeats": 4}', "ngram: .*greater than or equal to"),
]  # fmt: skip


@pytest.mark.parametrize(("setting", "type_", "value", "reason"), BAD)
def test_a_bad_value_makes_its_row_invalid(stage, setting, type_, value, reason):
    bad, good = prompts(stage, setting, [value, None], type_)
    assert (bad["status"], good["status"]) == ("invalid", "ready")
    assert bad["error"].startswith(f"column own: {setting}")
    assert "\n" not in bad["error"]
    assert re.search(reason, bad["error"]), bad["error"]


@pytest.mark.parametrize(("setting", "type_", "value", "reason"), BAD)
def test_preview_off_keeps_bad_values_out(stage, setting, type_, value, reason):
    (bad,) = prompts(stage, setting, [value], type_, output={"preview": False})
    assert bad["status"] == "invalid"
    assert f"got {value!r}"[:20] not in bad["error"]
    assert not {"strin'", "x<pad>", "a(b", "secrets"} & set(re.split(r"[ .'\"]", bad["error"]))


def test_settings_that_do_not_go_together_make_a_row_invalid(stage):
    bad, good = prompts(stage, "min_new_tokens", [9, 8], pa.int64())
    assert bad["error"] == (
        "sampling.from_columns: min_new_tokens must not exceed max_new_tokens (8), got 9"
    )
    assert good["status"] == "ready"


def test_a_long_answer_makes_its_row_too_long(stage):
    rows = prompts(stage, "max_new_tokens", [2040, None], pa.int64())
    assert [row["status"] for row in rows] == ["too_long", "ready"]
    assert "2040 new ones exceed 2048" in rows[0]["error"]
    tokens = rows[1]["prompt_tokens"]
    assert stage.manifest().meta["max_request_tokens"] == tokens + 8


def test_a_row_is_cut_for_its_own_limit(stage):
    long = "word " * 500
    fields = [("text", pa.string()), ("own", pa.int64())]
    rows = stage.run(
        [{"text": long, "own": 2000}, {"text": long, "own": None}],
        {"column": "text", "too_long": "truncate_right"},
        fields,
        sampling={"from_columns": {"max_new_tokens": "own"}},
    )
    assert [row["truncated"] for row in rows] == [True, False]
    assert rows[0]["prompt_tokens"] + 2000 <= 2048


def test_a_missing_column_is_named(stage):
    with pytest.raises(
        ValueError, match=r"^sampling.from_columns.top_p: no column 'own' in the dataset; it has"
    ):
        stage.run(["Hi"], sampling={"from_columns": {"top_p": "own"}})


def test_a_missing_column_stops_the_source_already(tmp_path):
    (tmp_path / "source.jsonl").write_text('{"text": "Hi"}\n')
    spec = make_spec(tmp_path, sampling={"from_columns": {"seed": "own"}})
    with pytest.raises(ValueError, match=r"^sampling.from_columns.seed: .* no column 'own'"):
        ingest_partition(spec, make_store(spec), KEY)


def test_the_columns_are_part_of_a_rows_identity(tmp_path):
    (tmp_path / "source.jsonl").write_text(
        "".join(json.dumps({"text": "Hi", "own": own, "x": 1}) + "\n" for own in (1, 2, 1))
    )
    spec = make_spec(tmp_path, sampling={"from_columns": {"top_k": "own", "seed": "own"}})
    assert id_columns(spec) == ["text", "own"]
    store = make_store(spec)
    ingest_partition(spec, store, KEY)
    (batch,) = store.partition(RAW_DATASET, KEY).read(["row_id"])
    first, second, third = batch.column("row_id").to_pylist()
    assert first != second
    assert third == f"{first}-1"


def test_a_renamed_column_is_found_by_its_own_name(stage):
    stage.write_raw(
        [{"text": "Hi", "source_seed": 5}],
        [("text", pa.string()), ("source_seed", pa.int64())],
        {"renamed_columns": {"seed": "source_seed"}},
    )
    (row,) = stage.format(stage.spec(sampling={"from_columns": {"seed": "seed"}}))
    assert row["sampling"]["seed"] == 5


def test_a_column_of_mixed_types_is_json_text(stage):
    stage.write_raw(
        [{"text": "Hi", "own": '"END"'}, {"text": "Hi", "own": '["a", "b"]'}],
        [("text", pa.string()), ("own", pa.string())],
        {"json_text_columns": ["own"]},
    )
    rows = stage.format(stage.spec(sampling={"from_columns": {"stop": "own"}}))
    assert [row["sampling"]["stop"] for row in rows] == [["END"], ["a", "b"]]


def test_a_grammar_that_breaks_llguidance_is_its_rows_alone(stage, monkeypatch):
    from llguidance import LLMatcher

    check = LLMatcher.validate_grammar

    def breaking(grammar: str) -> str:
        if "breaks" in grammar:
            raise type("PanicException", (BaseException,), {})("nobody expected this")
        return check(grammar)

    monkeypatch.setattr(LLMatcher, "validate_grammar", staticmethod(breaking), raising=True)
    values = [json.dumps({"choice": [text]}) for text in ("breaks", "holds")]
    bad, good = prompts(stage, "structured_output", values, pa.string())
    assert bad["status"] == "invalid"
    assert "nobody expected this" in bad["error"]
    assert good["status"] == "ready"


def test_a_bad_row_keeps_the_datasets_sampling_and_its_neighbours_their_prompts(stage):
    rows = prompts(stage, "top_p", [2.0, 0.5], pa.float64())
    assert rows[0]["sampling"]["top_p"] == 1.0
    assert rows[0]["prompt"] is None
    assert rows[1]["prompt"] == render("Hi")


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"from_columns": {"temprature": "t"}}, "from_columns.temprature.*: input should be 'temp"),
        ({"best_of": 2, "n": 3}, r"sampling: best_of must be at least n \(3\), got 2"),
        ({"best_of": 2, "from_columns": {"n": "n"}}, "set best_of or from_columns.n, not both"),
        ({"max_new_tokens": 0}, "max_new_tokens must be 1 or more, got 0; 0 needs prompt_logprobs"),
        ({"logprobs": 21}, "sampling.logprobs: .*less than or equal to 20, got 21"),
        ({"structured_output": {}}, "structured_output: set exactly one of .*, got none"),
        ({"structured_output": {"regex": "a", "choice": ["b"]}}, "got regex and choice"),
        ({"structured_output": {"choice": [""]}}, "structured_output.choice.0: .* at least 1"),
        ({"loop_guard": {"ngram": 4}}, "sampling.loop_guard.repeats is missing; set it"),
        ({"response_format": 1}, "sampling.response_format is called structured_output here"),
    ],
)
def test_wrong_settings_of_a_dataset_are_refused(sampling, message):
    spec = {
        "name": "data",
        "source": {"path": "rows.jsonl"},
        "prompt": {"column": "text"},
        "generator": {"model": "owner/name"},
        "sampling": sampling,
    }
    with pytest.raises(ValueError, match=message) as error:
        load_spec(spec)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("structured", "message"),
    [
        ({"json_schema": {"type": 5}}, r"^sampling.structured_output.json_schema: cannot be used"),
        ({"regex": "a(b"}, r"^sampling.structured_output.regex: cannot be used"),
        ({"grammar": 'start: "a" x'}, r"^sampling.structured_output.grammar: cannot be used"),
        ({"json_schema": "nowhere.json"}, r"json_schema: nowhere.json cannot be read \(No such"),
    ],
)
def test_a_datasets_structure_that_cannot_be_made_is_found_before_the_run(
    stage, structured, message
):
    with pytest.raises(ValueError, match=message) as error:
        stage.run(["Hi"], sampling={"structured_output": structured})
    assert "\n" not in str(error.value)


def test_a_schema_may_be_in_a_file(stage, tmp_path):
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    spec = stage.spec(sampling={"structured_output": {"json_schema": "schema.json"}})
    stage.write_raw([{"text": "Hi"}], [("text", pa.string())])
    (row,) = stage.format(spec.resolve_paths(tmp_path))
    assert row["sampling"]["structured"] == {"kind": "json_schema", "value": json.dumps(SCHEMA)}
    before = stage.manifest().inputs["sampling"]
    assert before["structured_output"]["json_schema"] == SCHEMA  # another file makes it stale
    (tmp_path / "schema.json").write_text("[]")
    with pytest.raises(ValueError, match=r"schema.json must hold a JSON object"):
        stage.format(spec.resolve_paths(tmp_path))


def test_settings_that_are_off_do_not_make_older_prompts_stale():
    older = {"temperature", "top_p", "top_k", "min_p", "max_new_tokens", "min_new_tokens", "n"}
    later = {"logprobs", "prompt_logprobs", "best_of", "structured_output", "loop_guard"}
    later |= {"allowed_token_ids", "bad_words", "banned_strings", "thinking_token_budget"}
    assert older <= sampling_inputs(SamplingSpec()).keys()
    assert not sampling_inputs(SamplingSpec()).keys() & (later | {"from_columns"})
    assert sampling_inputs(SamplingSpec(logprobs=0))["logprobs"] == 0
    zero = SamplingSpec(thinking_token_budget=0)
    assert sampling_inputs(zero)["thinking_token_budget"] == 0


OPENS = (
    "{{ messages[-1]['content'] }}{% if 'think' in messages[-1]['content'] %}<think>\n{% endif %}"
)


def test_a_budget_for_thoughts_counts_from_where_they_begin(stage, tmp_path):
    """In the prompt, by its template, or at the mark that the answer begins with."""
    (tmp_path / "opens.jinja").write_text(OPENS)
    rows = [
        {"text": "think", "most": None},
        {"text": "hi", "most": 3},
        {"text": "think", "most": 0},
    ]
    stage.write_raw(rows, [("text", pa.string()), ("most", pa.int64())])
    changes = {
        "prompt": {"column": "text", "chat_template": str(tmp_path / "opens.jinja")},
        "sampling": {"thinking_token_budget": 9, "from_columns": {"thinking_token_budget": "most"}},
    }
    stage.format(stage.spec(output={"reasoning": True}, **changes))
    found = [request.sampling.thinking for request in requests(stage, 3)]
    assert found == [
        ThinkingBudget(9, is_open=True), ThinkingBudget(3), ThinkingBudget(0, is_open=True),
    ]  # fmt: skip
    before = stage.manifest().inputs["reasoning"]
    assert before == {"start": "<think>", "end": "</think>"}  # other marks make them stale


@pytest.mark.parametrize(
    "sampling", [{"thinking_token_budget": 9}, {"from_columns": {"thinking_token_budget": "most"}}]
)
def test_a_budget_for_thoughts_needs_their_marks(stage, sampling):
    with pytest.raises(ValueError, match=r"thinking_token_budget needs output.reasoning, which"):
        stage.spec(sampling=sampling)


def test_prompts_that_are_scored_ask_for_it(stage):
    stage.run(["Hi"], max_new_tokens=0, sampling={"prompt_logprobs": True})
    (request,) = requests(stage, 1)
    assert request.prompt_logprobs
    assert request.sampling.max_new_tokens == 0
    key = request_key(request.input_ids, request.sampling, "model", prompt_logprobs=True)
    assert request.key == key


def test_the_best_of_some_samples_needs_their_log_probabilities(stage):
    (row,) = stage.run(["Hi"], sampling={"n": 2, "best_of": 5})
    assert (row["num_samples"], row["sampling"]["logprobs"]) == (5, 0)
    meta = stage.manifest().meta
    assert (meta["num_requests"], meta["num_kept"]) == (5, 2)
