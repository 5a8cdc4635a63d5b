"""Rows with several turns through Dagster, against transformers, and in processes that die."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bulk_pipeline import build_bulk_inference_defs, scan_table
from bulk_pipeline.assets import open_store
from bulk_pipeline.engine.loading import load_generator
from bulk_pipeline.plan import plan_dataset
from bulk_pipeline.plan_view import to_text
from bulk_pipeline.report import report_partition
from bulk_pipeline.report_view import to_html
from bulk_pipeline.spec import BulkInferenceSpec, load_spec
from bulk_pipeline.storage.schemas import COMPLETIONS_SCHEMA
from bulk_pipeline_tests.crash import Crashes
from bulk_pipeline_tests.test_faults import finished, real_spec, stable_tables

ROWS: list[dict[str, Any]] = [
    {"id": 1, "turns": ["Name a colour.", "Why that one?"]},
    {"id": 2, "turns": ["What is 12 times 12?", "And divided by 6?", "Are you sure?"]},
    {"id": 3, "turns": ["Just one."]},
    {"id": 4, "turns": ["Fine.", None]},
]
PLACES = [(1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (3, 0), (4, 0), (4, 1)]


def make_spec(root: Path, model: Path, **changes: Any) -> BulkInferenceSpec:
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    values: dict[str, Any] = {
        "name": "data",
        "source": {"path": str(root / "rows.jsonl"), "id_column": "id"},
        "prompt": {"turns_column": "turns"},
        "sampling": {"temperature": 0, "max_new_tokens": 8},
        "generator": {
            "model": str(model),
            "device": "cpu",
            "cache_tokens": 4096,
            "max_batch_size": 2,
        },
        "output": {"root": str(root / "bulk")},
    }
    return load_spec(values | changes)


def materialize(spec: BulkInferenceSpec, **options: Any) -> dg.ExecuteInProcessResult:
    defs = build_bulk_inference_defs(spec.model_dump(), ".")
    with dg.DagsterInstance.ephemeral() as instance:
        return dg.materialize(
            list(defs.assets or []),
            instance=instance,
            resources=defs.resources,
            partition_key="all",
            raise_on_error=False,
            **options,
        )


def table(spec: BulkInferenceSpec, name: str = "output") -> pl.DataFrame:
    found = scan_table(spec.output.root, spec.name, name).collect()
    assert isinstance(found, pl.DataFrame)
    return found


def metadata(result: dg.ExecuteInProcessResult, name: str) -> dict[str, Any]:
    (event, *_) = result.asset_materializations_for_node(f"data__{name}")
    return {key: value.value for key, value in event.metadata.items()}


def test_each_turn_of_each_row_is_in_the_output_once(tmp_path, toy):
    spec = make_spec(tmp_path, toy, sampling={"max_new_tokens": 8, "n": 2, "logprobs": 0})
    result = materialize(spec)
    assert result.success
    failed = {e.check_name for e in result.get_asset_check_evaluations() if not e.passed}
    assert failed <= {"length_rate", "empty_rate"}
    rows = table(spec)
    found = list(rows.select("id", "sample_index", "turn").iter_rows())
    assert found == sorted((id_, sample, turn) for id_, turn in PLACES for sample in range(2))
    bad = rows.filter(pl.col("id") == 4)
    assert set(bad["status"]) == {"invalid"}
    assert set(bad["error"]) == {"turns[1] is null, must be text"}
    assert metadata(result, "completions")["requests_run"] == 12
    later = table(spec, "completions").filter(
        (pl.col("turn") > 0) & pl.col("logprobs").is_not_null()
    )
    assert len(later) == 6
    assert set(rows.filter(pl.col("id") < 4)["status"]) <= {"stop", "length"}


def test_plan_and_report_know_of_turns(tmp_path, toy):
    spec = make_spec(tmp_path, toy)
    assert spec.generator is not None
    store = open_store(spec)
    materialize(spec, selection=["data/raw_dataset", "data/prompts"])
    plan = plan_dataset(spec, store, spec.generator)
    prompts = table(spec, "prompts").filter(pl.col("status") == "ready")
    later = [
        len(turn["input_ids"]) for row in prompts["later_turns"].to_list() for turn in row or ()
    ]
    assert (plan.total("requests"), plan.total("not_ready"), plan.total("to_run")) == (8, 2, 6)
    assert plan.total("later_turns") == 3
    assert plan.total("run_prompt_tokens") == prompts["prompt_tokens"].sum() + sum(later)
    assert plan.total("most_new_tokens") == 6 * 8
    assert "3 of the requests to run are later turns of a conversation" in to_text(plan)
    materialize(spec)
    assert plan_dataset(spec, store, spec.generator).total("to_run") == 0
    report = report_partition(spec, store, "all")
    assert report.requests == 8
    assert {row["turn"] for row in report.slowest} == {0, 1, 2}
    by_turn = {(s["row_id"], s["turn"]): s["prompt"] for s in report.samples}
    assert by_turn["1", 1].startswith("<|im_end|>\n<|im_start|>user\nWhy that one?")
    assert "turn 1" in to_html([report])


def test_a_batch_file_has_the_last_turn_of_each_row(tmp_path, toy):
    output = {"root": str(tmp_path / "bulk"), "formats": ["openai_batch"]}
    spec = make_spec(tmp_path, toy, output=output)
    assert materialize(spec).success
    path = tmp_path / "bulk" / "data" / "output" / "all" / "output.openai_batch.jsonl"
    results = [json.loads(line) for line in path.read_text().splitlines()]
    assert [result["custom_id"] for result in results] == ["1", "2", "3", "4"]
    last = table(spec).group_by("id", maintain_order=True).last()["completion"].to_list()
    answers = [result["response"]["body"]["choices"][0]["message"] for result in results[:3]]
    assert [answer["content"] for answer in answers] == last[:3]
    assert results[3]["error"]["message"] == "turns[1] is null, must be text"


def test_a_run_that_stops_between_turns_is_finished_by_the_next(tmp_path, toy_float64, monkeypatch):
    (tmp_path / "whole").mkdir()
    whole = make_spec(tmp_path / "whole", toy_float64)
    materialize(whole)
    spec = make_spec(tmp_path, toy_float64)
    assert spec.generator is not None
    kind = type(load_generator(spec.generator))
    run = kind.run

    def stopping(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for count, completion in enumerate(run(self, *args, **kwargs)):
            if count == 2:
                raise RuntimeError("stopped")
            yield completion

    with monkeypatch.context() as patch:
        patch.setattr(kind, "run", stopping)
        assert not materialize(spec).success
    parts = Path(spec.output.root, "data", "completions", "all").glob("part-*.parquet")
    stored = pl.concat([pl.read_parquet(part) for part in parts])
    assert 0 in stored["turn"].to_list()
    resumed = materialize(spec)
    assert resumed.success
    assert metadata(resumed, "completions")["requests_run"] == 6 - len(stored)
    unstable = [f.name for f in COMPLETIONS_SCHEMA if (f.metadata or {}).get(b"stable")]
    tables = [table(each, "completions").drop(unstable) for each in (spec, whole)]
    assert tables[0].equals(tables[1])


@pytest.fixture(scope="module")
def crashes() -> Iterator[Crashes]:
    with Crashes() as crashes:
        yield crashes


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
def test_a_process_that_is_killed_between_turns(crashes, toy_float64, tmp_path, temperature):
    source = tmp_path / "source.jsonl"
    rows = [{"turns": [f"question {i % 4}", "and?", f"why {i}?"]} for i in range(6)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def spec(name: str) -> dict[str, Any]:
        values = real_spec(tmp_path / name, source, toy_float64)
        values["output"] |= {"flush_rows": 1}
        values["sampling"] |= {"temperature": temperature}
        return values | {"prompt": {"turns_column": "turns"}}

    whole = crashes.run(spec("whole"))
    assert whole["error"] is None
    expected = stable_tables(spec("whole"))
    assert len(expected["completions"]) == 18
    num_run = whole["metadata"][2]["requests_run"]
    passed = whole["points"]["commit"]
    for nth in range(3, passed - 4, 4):
        killed = spec(str(nth))
        assert crashes.run(killed, fault=f"commit:{nth}:KILL")["signal"] == 9
        resumed = crashes.run(killed)
        assert resumed["error"] is None, nth
        assert stable_tables(killed) == expected, nth
        assert finished(killed).total() <= num_run + 1, nth


def test_two_turns_are_those_of_transformers(tmp_path, smollm2):
    spec = make_spec(tmp_path, smollm2, sampling={"temperature": 0, "max_new_tokens": 12})
    assert materialize(spec).success
    completions = table(spec, "completions")
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    compared = 0
    for row in ROWS[:2]:
        chat = []
        own = completions.filter(pl.col("row_id") == str(row["id"]))["completion_ids"].to_list()
        for question, ids in zip(row["turns"], own, strict=True):
            chat.append({"role": "user", "content": question})
            prompt = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            out = model.generate(**prompt, do_sample=False, max_new_tokens=12)[0]
            assert out[prompt["input_ids"].shape[1] :].tolist() == ids, question
            text = tokenizer.decode(ids, skip_special_tokens=True)
            chat.append({"role": "assistant", "content": text})
            compared += 1
            if tokenizer.encode(text) != [i for i in ids if i != tokenizer.eos_token_id]:
                break  # the same text in other tokens is another prompt
    assert compared >= 4
