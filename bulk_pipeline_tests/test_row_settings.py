"""Rows that ask for different things, through Dagster and the toy model, and what they get."""

import json
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pytest

from bulk_pipeline import build_bulk_inference_defs, scan_table
from bulk_pipeline.spec import load_spec

SCHEMA = {
    "type": "object",
    "properties": {"mood": {"enum": ["good", "bad"]}, "is_urgent": {"type": "boolean"}},
    "required": ["mood", "is_urgent"],
    "additionalProperties": False,
}


def materialize(tmp_path: Path, toy: Path, rows: list[dict[str, Any]], **changes: Any) -> Any:
    """Run a dataset of these rows; the spec is in `spec(...)`."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    defs = build_bulk_inference_defs(spec(toy, **changes), tmp_path)
    with dg.DagsterInstance.ephemeral() as instance:
        return dg.materialize(
            list(defs.assets or []),
            instance=instance,
            resources=defs.resources,
            partition_key="all",
            raise_on_error=False,
        )


def spec(toy: Path, **changes: Any) -> dict[str, Any]:
    return {
        "name": "data",
        "source": {"path": "rows.jsonl"},
        "prompt": {"column": "text"},
        "generator": {
            "model": str(toy),
            "device": "cpu",
            "cache_tokens": 4096,
            "max_batch_size": 8,
        },
    } | changes


def output(tmp_path: Path) -> list[dict[str, Any]]:
    table = scan_table(str(tmp_path / "data" / "bulk"), "data").collect()
    assert isinstance(table, pl.DataFrame)
    return table.to_dicts()


def failed_checks(result: dg.ExecuteInProcessResult) -> set[str]:
    return {e.check_name for e in result.get_asset_check_evaluations() if not e.passed}


def test_each_row_gets_what_it_asks_for(tmp_path, toy):
    choices = json.dumps({"choice": ["yes", "no"]})
    rows: list[dict[str, Any]] = [
        {"text": "one", "limit": 3, "heat": 0.0},
        {"text": "one", "limit": 5, "heat": 0.0, "samples": 2},
        {"text": "two", "heat": 1.0, "samples": 3, "number": 1},
        {"text": "two", "heat": 1.0, "samples": 3, "number": 2},
        {"text": "three", "shape": choices, "limit": 20},
        {"text": "bad", "heat": -1.0},
        {"text": "none of all this"},
    ]
    columns = {
        "max_new_tokens": "limit",
        "temperature": "heat",
        "n": "samples",
        "seed": "number",
        "structured_output": "shape",
    }
    sampling = {"max_new_tokens": 6, "logprobs": 1, "from_columns": columns}
    result = materialize(tmp_path, toy, rows, sampling=sampling)
    assert result.success
    assert failed_checks(result) <= {"length_rate", "empty_rate"}  # of nonsense
    found = output(tmp_path)
    assert [(row["row_index"], row["sample_index"]) for row in found] == [
        (0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (3, 0), (3, 1), (3, 2), (4, 0), (5, 0),
        (6, 0),
    ]  # fmt: skip
    short, long, again, *sampled = found[:9]
    assert (short["completion_tokens"], long["completion_tokens"]) == (3, 5)
    assert long["completion"].startswith(short["completion"])
    assert again["completion"] == long["completion"]
    assert len({row["seed"] for row in sampled}) == 6
    assert found[9]["completion"] in ("yes", "no")
    assert (found[10]["status"], found[10]["completion"]) == ("invalid", None)
    assert found[10]["error"].startswith("column heat: temperature: input should be greater")
    assert found[11]["completion_tokens"] <= 6
    for row in found:
        if row["status"] != "invalid":
            assert len(row["logprobs"]) == len(row["top_logprobs"]) == row["completion_tokens"]
            assert row["cumulative_logprob"] == pytest.approx(sum(row["logprobs"]), abs=1e-4)


def test_answers_of_a_schema_are_unfolded(tmp_path, toy):
    rows = [{"text": "Hi", "limit": limit} for limit in (60, 2)]
    sampling = {
        "structured_output": {"json_schema": SCHEMA},
        "from_columns": {"max_new_tokens": "limit"},
        "temperature": 0,
    }
    result = materialize(tmp_path, toy, rows, sampling=sampling, output={"unfold": True})
    assert result.success
    whole, cut = output(tmp_path)
    assert (whole["status"], whole["parsed"]) == ("stop", True)
    answer = {"mood": whole["mood"], "is_urgent": whole["is_urgent"]}
    assert json.loads(whole["completion"]) == answer
    assert (cut["status"], cut["parsed"], cut["mood"]) == ("length", False, None)
    assert cut["completion"]


def test_prompts_are_scored(tmp_path, toy):
    rows = [{"text": "one two three"}, {"text": "one two"}]
    sampling = {"prompt_logprobs": True, "max_new_tokens": 0}
    result = materialize(tmp_path, toy, rows, sampling=sampling)
    assert result.success
    assert not failed_checks(result)
    for row in output(tmp_path):
        assert row["completion_tokens"] == 0
        assert len(row["prompt_logprobs"]) == row["prompt_tokens"] - 1
        assert row["perplexity"] > 1


def test_the_best_of_several_samples_are_kept(tmp_path, toy):
    sampling = {"best_of": 5, "n": 2, "max_new_tokens": 4}
    result = materialize(tmp_path, toy, [{"text": "Hi"}, {"text": None}], sampling=sampling)
    assert result.success
    assert "conservation" not in failed_checks(result)
    kept, bad = output(tmp_path)[:2], output(tmp_path)[2:]
    assert [row["status"] for row in bad] == ["invalid", "invalid"]
    made = scan_table(str(tmp_path / "data" / "bulk"), "data", "completions").collect().to_dicts()
    means = {
        row["sample_index"]: row["cumulative_logprob"] / row["completion_tokens"]
        for row in made
        if row["row_index"] == 0
    }
    assert len(means) == 5
    assert {row["sample_index"] for row in kept} == set(sorted(means, key=means.__getitem__)[-2:])


def test_answers_in_a_loop_end(tmp_path, toy):
    bias = {"logit_bias": {300: 100.0}, "temperature": 0}
    sampling = {"max_new_tokens": 50, "loop_guard": {"ngram": 1, "repeats": 4}} | bias
    result = materialize(tmp_path, toy, [{"text": "Hi"}], sampling=sampling)
    assert result.success
    (row,) = output(tmp_path)
    assert (row["status"], row["completion_tokens"]) == ("loop", 4)


def test_a_column_that_is_not_there_stops_the_run_before_the_model(tmp_path, toy):
    sampling = {"from_columns": {"seed": "nowhere"}}
    result = materialize(tmp_path, toy, [{"text": "Hi"}], sampling=sampling)
    assert not result.success
    data = result.failure_data_for_node("data__raw_dataset")
    assert data is not None
    assert data.user_failure_data is not None
    assert "sampling.from_columns.seed: the source has no column 'nowhere'" in str(
        data.user_failure_data.description
    )


def examples() -> list[str]:
    """The examples in the descriptions of the settings for requests."""
    return [
        "sampling: {from_columns: {temperature: temp, stop: ends}}",
        "sampling: {logprobs: 5}",
        "sampling: {prompt_logprobs: true, max_new_tokens: 0}",
        "sampling: {best_of: 8}",
        "sampling: {structured_output: {choice: [positive, negative]}}",
        "sampling: {structured_output: {regex: '[0-9]{1,3}'}}",
        "sampling: {loop_guard: {ngram: 8, repeats: 4}}",
        "sampling: {bad_words: [sorry]}",
        "sampling: {banned_strings: ['as an ai']}",
        "sampling: {allowed_token_ids: [15, 16]}",
        "{sampling: {thinking_token_budget: 512}, output: {reasoning: true}}",
        "output: {reasoning: {}}",
        "output: {reasoning: true}",
        "output: {reasoning: {start: '[THINK]', end: '[/THINK]'}}",
    ]


@pytest.mark.parametrize("example", examples())
def test_the_examples_of_the_settings_are_valid(example, toy):
    import yaml

    load_spec(spec(toy, **yaml.safe_load(example)))
