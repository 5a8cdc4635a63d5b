"""The plan: what it counts, through the stages' own tables and through the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulk_pipeline import build_bulk_inference_defs
from bulk_pipeline.charts import to_png, to_svg
from bulk_pipeline.lengths import Lengths
from bulk_pipeline.plan import add_sizes, current_fingerprint, plan_dataset
from bulk_pipeline.plan_view import picture, to_json, to_text
from bulk_pipeline.stages.complete import complete_partition
from bulk_pipeline.stages.format import format_partition
from bulk_pipeline.stages.ingest import ingest_partition
from bulk_pipeline.stages.join import join_partition
from bulk_pipeline_tests.factories import (
    KEY,
    EchoGenerator,
    make_prompt,
    make_spec,
    make_store,
    write_prompts,
)

PAGE = 256


@pytest.fixture
def spec(tmp_path, toy):
    (tmp_path / "source.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    return make_spec(tmp_path, generator={"model": str(toy), "device": "cpu"})


@pytest.fixture
def store(spec):
    return make_store(spec)


def plan(spec, store, **kwargs):
    return plan_dataset(spec, store, spec.generator, **kwargs)


def complete(spec, store, generator=None, key=KEY):
    generator = generator or EchoGenerator()
    return complete_partition(
        spec, store, key, lambda: generator, current_fingerprint(spec.generator)
    )


def test_without_prompts_the_source_s_rows_are_counted_and_that_is_said(spec, store):
    found = plan(spec, store, tokens_per_second=10.0)
    (partition,) = found.partitions
    assert (partition.rows, partition.has_prompts, partition.state) == (2, False, "missing")
    assert found.estimate.requests == 2
    assert found.estimate.most_seconds == 2 * 256 / 10
    assert "all: no prompts yet, only rows are counted" in to_text(found)


def test_prompts_that_a_run_would_make_anew_are_noted_and_no_others(spec, store):
    ingest_partition(spec, store, KEY)
    format_partition(spec, store, KEY, spec.generator)
    complete(spec, store)
    join_partition(spec, store, KEY)
    longer = spec.model_copy(
        update={"sampling": spec.sampling.model_copy(update={"max_new_tokens": 300})}
    )
    note = "a run makes the prompts anew, the numbers are of the stored ones"
    assert f"settings changed: sampling.max_new_tokens: {note}" in to_text(plan(longer, store))
    format_partition(longer, store, KEY, longer.generator)
    (partition,) = plan(longer, store).partitions
    assert partition.state == "completions is older than prompts"
    assert note not in to_text(plan(longer, store))


def test_rows_lengths_and_what_cannot_run(spec, store):
    prompts = [make_prompt(i, input_ids=[1] * (10 * i + 1)) for i in range(10)]
    bad = [
        make_prompt(10, status="too_long", error="9 tokens over", input_ids=[1] * 3000),
        make_prompt(11, status="invalid", error="not text", input_ids=[]),
    ]
    write_prompts(store, [*prompts, *bad])
    found = to_json(plan(spec, store))
    assert found["statuses"] == {"invalid": 1, "ready": 10, "too_long": 1}
    lengths = found["prompt_tokens"]
    assert (lengths["min"], lengths["p50"], lengths["max"], lengths["total"]) == (1, 41, 91, 460)
    assert [each["rows"] for each in lengths["histogram"]] == [2, 2, 3, 3]
    (partition,) = found["partitions"]
    assert [(row["row_index"], row["error"]) for row in partition["cannot_run"]] == [
        (10, "9 tokens over"),
        (11, "not text"),
    ]
    assert "row 10: too_long: 9 tokens over" in to_text(plan(spec, store))


def test_rows_are_named_by_the_column_that_identifies_them(spec, store):
    source = spec.source.model_copy(update={"id_column": "number"})
    spec = spec.model_copy(update={"source": source})
    write_prompts(store, [make_prompt(0, row_id="T-104", status="empty", error="empty")])
    assert f"{KEY} row 0 (number T-104): empty: empty" in to_text(plan(spec, store))


def test_with_preview_off_rows_are_named_by_their_place_alone(spec, store):
    source = spec.source.model_copy(update={"id_column": "mail"})
    output = spec.output.model_copy(update={"preview": False})
    spec = spec.model_copy(update={"source": source, "output": output})
    write_prompts(store, [make_prompt(0, row_id="someone@example.org", status="empty")])
    found = plan(spec, store)
    assert found.partitions[0].cannot_run[0]["row_index"] == 0
    assert "someone" not in json.dumps(to_json(found)) + to_text(found)


def test_equal_requests_run_once(spec, store):
    write_prompts(store, [make_prompt(i, input_ids=[7, i // 3]) for i in range(9)])
    found = plan(spec, store)
    assert (found.total("requests"), found.total("duplicates")) == (9, 6)
    assert "run with an equal one: 6" in to_svg(picture(found))
    assert found.total("to_run") == found.estimate.requests == 3


def test_what_has_an_answer_does_not_run_and_the_rest_says_why(spec, store):
    write_prompts(store, [make_prompt(i) for i in range(5)])
    complete(spec, store, EchoGenerator(errors_at=[3]))
    changed = [make_prompt(i) for i in range(4)] + [make_prompt(4, input_ids=[9, 9])]
    write_prompts(store, [*changed, make_prompt(5)])
    found = plan(spec, store)
    assert (found.total("answered"), found.total("to_run")) == (3, 3)
    assert found.counts("reasons") == {"error_retried": 1, "new": 1, "prompt_changed": 1}
    report = complete(spec, store)
    ran = {name: n for name, n in report.metadata.items() if name.startswith("requests_run_")}
    assert ran == {f"requests_run_{name}": n for name, n in found.counts("reasons").items()}


def test_another_model_has_no_answers(spec, store, tmp_path):
    from bulk_pipeline_tests.toy import toy_model

    write_prompts(store, [make_prompt(0)])
    complete(spec, store)
    other = spec.generator.model_copy(update={"model": str(toy_model(tmp_path / "b", seed=1))})
    found = plan_dataset(spec, store, other)
    assert found.total("to_run") == 1
    assert found.counts("reasons") == {"model_changed": 1}
    missing = spec.generator.model_copy(update={"model": "owner/not-here"})
    assert "is not on this machine" in to_text(plan_dataset(spec, store, missing))


def test_answers_of_another_partition_are_found(spec, store):
    write_prompts(store, [make_prompt(0), make_prompt(1)], key="old")
    complete(spec, store, key="old")
    write_prompts(store, [make_prompt(1), make_prompt(2)], renumber=True)
    found = plan(spec, store, keys=[KEY])
    assert (found.total("in_others"), found.total("to_run")) == (1, 1)


@pytest.mark.parametrize(
    ("prompts", "shared"),
    [
        ([[1] * 600, [1] * 600], 2 * PAGE),
        ([[1] * 600, [1] * 300 + [2] * 300], PAGE),
        ([[2] + [1] * 599, [3] + [1] * 599], 0),  # equal pages behind different ones
        ([[1] * PAGE, [1] * PAGE + [2]], 0),  # the last token is computed in any case
        ([[1] * (PAGE + 1), [1] * PAGE + [2]], PAGE),
    ],
    ids=["equal", "first page", "other start", "one page", "one page and a token"],
)
def test_shared_leading_pages(spec, store, prompts, shared):
    limits = ({"max_new_tokens": 8 + i} for i in range(len(prompts)))  # not the same request
    rows = [make_prompt(i, input_ids=ids, sampling=next(limits)) for i, ids in enumerate(prompts)]
    write_prompts(store, rows)
    found = plan(spec, store)
    assert found.total("shared_prefix_tokens") == shared
    assert found.total("run_prompt_tokens") == sum(map(len, prompts))


def test_samples_of_a_row_share_its_pages(spec, store):
    sampling = {"temperature": 1.0}
    write_prompts(store, [make_prompt(0, input_ids=[1] * 300, num_samples=3, sampling=sampling)])
    found = plan(spec, store)
    assert (found.total("run_prompt_tokens"), found.total("shared_prefix_tokens")) == (
        900,
        2 * PAGE,
    )


def test_time_and_cost_from_the_last_run_or_as_given(spec, store):
    write_prompts(store, [make_prompt(i) for i in range(4)])
    assert plan(spec, store).rate is None
    complete(spec, store)
    write_prompts(store, [make_prompt(i) for i in range(14)])
    measured = plan(spec, store)
    assert measured.rate.tokens_per_request == 4.0
    assert measured.estimate.expected_tokens == 40
    assert measured.estimate.most_tokens == 80
    given = plan(spec, store, tokens_per_second=0.1, price_per_hour=9.0)
    assert (given.estimate.seconds, given.estimate.cost) == (400.0, 1.0)
    assert (given.estimate.most_seconds, given.estimate.most_cost) == (800.0, 2.0)


def test_a_cache_that_the_longest_request_does_not_fit_into_is_a_problem(spec, store):
    write_prompts(store, [make_prompt(0, input_ids=[1] * 500)])
    small = spec.generator.model_copy(update={"cache_tokens": 256})
    (problem,) = plan_dataset(spec, store, small).problems
    assert "generator.cache_tokens must hold the longest request" in problem
    assert "(508 tokens), got 256" in problem


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=50))
@settings(max_examples=50)
def test_histogram_and_percentiles_agree_with_the_lengths(values):
    import numpy as np

    lengths = Lengths()
    half = len(values) // 2
    lengths.add(np.array(values[:half], np.int32))
    lengths.add(np.array(values[half:], np.int32))
    for first, last, rows in lengths.bins():
        assert rows == sum(first <= value <= last for value in values)
    assert sum(rows for *_, rows in lengths.bins()) == len(values)
    found = lengths.numbers()
    ordered = sorted(values)
    assert (found["min"], found["max"], found["total"]) == (ordered[0], ordered[-1], sum(values))
    assert found["p50"] == ordered[-(-len(values) // 2) - 1]


def test_the_picture_is_small_and_of_its_kind(spec, store):
    write_prompts(store, [make_prompt(i, input_ids=[1] * (i + 1)) for i in range(50)])
    chart = picture(plan(spec, store))
    assert to_svg(chart).startswith("<svg ")
    assert len(to_svg(chart)) < 10_000
    png = to_png(chart)
    assert png.startswith(b"\x89PNG")
    assert len(png) < 100_000


def test_the_prompts_asset_carries_the_plan(tmp_path, toy):
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"text": "q {i % 2}"}}\n' for i in range(4)))
    spec = {
        "name": "data",
        "source": {"path": "rows.jsonl"},
        "prompt": {"column": "text"},
        "sampling": {"temperature": 0, "max_new_tokens": 4},
        "generator": {"model": str(toy), "device": "cpu"},
    }
    defs = build_bulk_inference_defs(spec, tmp_path)
    with dg.DagsterInstance.ephemeral() as instance:
        result = dg.materialize(
            list(defs.assets or []),
            selection=[dg.AssetKey(["data", name]) for name in ("raw_dataset", "prompts")],
            instance=instance,
            resources=defs.resources,
            partition_key="all",
        )
        assert result.success
        record = instance.fetch_materializations(dg.AssetKey(["data", "prompts"]), limit=1)
        metadata = record.records[0].asset_materialization.metadata
    assert metadata["requests_to_run"].value == 2
    assert metadata["requests_duplicate"].value == 2
    assert "2 of 4 requests to run" in metadata["plan"].value
    assert len(metadata["plan"].value) < 4000


def test_a_plan_on_the_command_line_imports_no_model_library(tmp_path, toy):
    (tmp_path / "rows.jsonl").write_text('{"text": "q"}\n')
    (tmp_path / "defs_here.py").write_text(
        "from bulk_pipeline import build_bulk_inference_defs\n"
        f"defs = build_bulk_inference_defs({{'name': 'data', 'source': {{'path': 'rows.jsonl'}},"
        f" 'prompt': {{'column': 'text'}}, 'generator': {{'model': {str(toy)!r}}}}})\n"
    )
    script = (
        "import sys\n"
        "from bulk_pipeline.cli import main\n"
        "main(['plan', '-m', 'defs_here', '--json', '--picture', 'p.png', 'data'],"
        " standalone_mode=False)\n"
        "heavy = {'torch', 'transformers', 'exllamav2', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"] == 1
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_sizes_that_auto_stands_for_on_this_machine(spec, store, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    write_prompts(store, [make_prompt(i) for i in range(3)])
    found = plan(spec, store)
    assert "sizes on this machine" not in to_text(found)
    add_sizes(found, spec.generator)
    sizes = found.engine["sizes"]
    assert (sizes["device"], sizes["max_batch_size"]) == ("cpu", 16)
    assert sizes["cache_tokens"] >= 16 * PAGE
    assert sizes["longest_requests_at_once"] == sizes["cache_tokens"] // PAGE
    assert f"a cache of {sizes['cache_tokens']:,} tokens" in to_text(found)
    assert to_json(found)["engine"]["sizes"] == sizes
    assert found.problems == []


def test_sizes_that_are_impossible_are_a_problem(tmp_path, toy, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "source.jsonl").write_text('{"text": "a"}\n')
    generator = {"model": str(toy), "device": "cpu", "cache_tokens": 256, "max_seq_len": 600}
    spec = make_spec(tmp_path, generator=generator)
    found = plan(spec, make_store(spec))
    add_sizes(found, spec.generator)
    assert "must hold one sequence of 600 tokens" in found.problems[-1]
