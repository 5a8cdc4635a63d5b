import json
from pathlib import Path
from typing import Any

import pytest
from throughput import Attempts, parse, rows_of, run
from throughput_breakdown import Phases
from throughput_loops import make_requests, second_half_rate
from throughput_report import draw_chart, read_results, tables
from throughput_work import STOP_EVERY, WORKLOADS, make_work, pages_of_longest, variant_of

VOCABULARY = 128_256
SHAPE = {"hidden_size": 4096, "num_hidden_layers": 32}


def make_line(**changes: Any) -> dict[str, Any]:
    line = {
        "generator": "bulk_pipeline",
        "workload": "mixed",
        "batch": 256,
        "sampling": "sampled",
        "label": None,
        "rows": 1024,
        "tokens_per_second": 1000.0,
        "whole_run": True,
        "settings": {"max_batch_size": 256},
        "model": {"name": "a model", "shape": SHAPE, "quantisation": "gptq 4-bit"},
        "machine": {"gpu": "a GPU", "gpus": 1, "cores": 16},
        "date": "2026-11-30T10:00:00+00:00",
    }
    return line | changes


def test_mixed_is_the_work_of_the_gpu_kit():
    """The numbers are those of the kit's `bare_loop.workload(1024, 128256)`."""
    rows = make_work("mixed", 1024, VOCABULARY)
    assert [(len(r.input_ids), r.max_new_tokens) for r in rows[:3]] == [
        (132, 105),
        (265, 147),
        (133, 128),
    ]
    assert rows[0].input_ids[:3] == [74906, 111374, 105454]
    assert sum(len(row.input_ids) for row in rows) == 195_841
    assert sum(row.max_new_tokens for row in rows) == 166_735
    assert sum(sum(row.input_ids) for row in rows) == 12_543_774_591


@pytest.mark.parametrize("workload", WORKLOADS)
def test_few_rows_are_the_first_of_many(workload: str):
    assert make_work(workload, 3, VOCABULARY) == make_work(workload, 9, VOCABULARY)[:3]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_variant_has_other_ids_and_the_same_lengths(workload: str):
    first = make_work(workload, 4, VOCABULARY, variant_of("mixed", 1, "greedy", 0))
    second = make_work(workload, 4, VOCABULARY, variant_of("mixed", 1, "greedy", 1))
    for a, b in zip(first, second, strict=True):
        assert (len(a.input_ids), a.max_new_tokens) == (len(b.input_ids), b.max_new_tokens)
        assert a.stop_token_ids == b.stop_token_ids
        assert all(x != y for x, y in zip(a.input_ids, b.input_ids, strict=True))
        assert all(300 <= i < VOCABULARY - 300 for i in b.input_ids)


def test_shared_prefix_shares_the_prefix_alone():
    first, second = make_work("shared_prefix", 2, VOCABULARY, 12345)
    assert first.input_ids[:1500] == second.input_ids[:1500]
    assert len(first.input_ids) == 1550
    assert first.input_ids[1500:] != second.input_ids[1500:]


def test_one_id_in_160_ends_a_row_of_early_stop():
    rows = make_work("early_stop", 5, VOCABULARY)
    assert {row.max_new_tokens for row in rows} == {512}
    assert len(rows[0].stop_token_ids) == round(VOCABULARY / STOP_EVERY)
    sampling = make_requests(rows, "sampled")[4].sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (1.0, 0.6, 4)
    assert sampling.stop_token_ids == rows[0].stop_token_ids


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_longest_row_fits_its_pages(workload: str):
    rows = make_work(workload, 200, VOCABULARY)
    longest = max(len(row.input_ids) + row.max_new_tokens for row in rows)
    pages = pages_of_longest([workload])
    assert longest <= 256 * pages
    assert longest > 256 * (pages - 1)


def test_a_small_batch_runs_few_rows():
    arguments = parse(["run", "model"])
    assert [rows_of(arguments, batch) for batch in ("1", "64", "256", "auto")] == [
        8, 512, 1024, 1024,
    ]  # fmt: skip


def test_a_batch_is_a_number_or_auto(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse(["run", "model", "--batches", "0"])
    assert "a number from 1, or auto, got 0" in capsys.readouterr().err


def test_batches_after_a_crash_are_still_measured(monkeypatch: pytest.MonkeyPatch):
    outcomes = {("1", "16", "64"): (-11, 2), ("64",): (0, 1)}
    asked = []

    def in_process(generator: str, batches: list[str]) -> tuple[int, int]:
        asked.append((generator, *batches))
        return outcomes[tuple(batches)]

    monkeypatch.setattr("throughput._measure_in_process", in_process)
    batches = ["--batches", "1", "16", "64"]
    assert run(parse(["run", "model", "--generators", "bulk_pipeline", *batches])) == 1
    assert asked == [("bulk_pipeline", "1", "16", "64"), ("bulk_pipeline", "64")]


def test_a_failure_is_named_and_does_not_stop_the_rest(capsys: pytest.CaptureFixture[str]):
    attempts = Attempts()
    with attempts.at("batch 512") as failing:
        raise ValueError("too large")
    with attempts.at("batch 64") as working:
        pass
    assert (bool(failing), bool(working), attempts.num_failed) == (False, True, 1)
    assert "FAILED: batch 512: ValueError: too large" in capsys.readouterr().out


def test_the_second_half_leaves_out_the_start():
    counts = [(0.0, 0), (4.0, 10), (5.0, 20), (7.5, 120), (10.0, 220)]
    assert second_half_rate(counts) == 40.0


def test_the_table_compares_with_the_plain_loops_better_rate():
    stopped = {"whole_run": False, "second_half_tokens_per_second": 50.0}
    text = tables(
        [
            make_line(tokens_per_second=7.0),  # measured again below
            make_line(generator="plain_loop", tokens_per_second=40.0, **stopped),
            make_line(),
            make_line(batch=1, rows=4, tokens_per_second=30.0),
        ]
    )
    assert "| mixed | sampled | plain_loop |  | 40* (50) |" in text
    assert "| mixed | sampled | bulk_pipeline | 30 (4 rows) | 1,000 |" in text
    assert "| | | times the plain loop |  | 20.0 |" in text


def test_labels_and_machines_stand_apart():
    machine = {"gpu": "another", "gpus": 2, "cores": 32}
    text = tables([make_line(), make_line(label="quantised"), make_line(machine=machine)])
    assert "| mixed | sampled | bulk_pipeline (quantised) | 1,000 |" in text
    assert text.count("| workload |") == 2
    assert "2 x another, 32 cores" in text


def test_the_chart_is_a_small_png(tmp_path: Path):
    pytest.importorskip("matplotlib")  # the machine with the GPU lacks it
    lines = [make_line(batch=b, sampling=s) for b in (1, 16, "auto") for s in ("greedy", "sampled")]
    lines += [make_line(generator="forward_pass", sampling=None, batch=b) for b in (1, 16)]
    path = tmp_path / "chart.png"
    assert "a model, gptq 4-bit, a GPU: mixed" in draw_chart(lines, path, "mixed", "")
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert draw_chart(lines, path, "long_prompt", "").startswith("not drawn")


def test_the_kept_results_can_be_read():
    results = Path(__file__).parents[2] / "benchmarks" / "results" / "throughput.jsonl"
    lines = read_results(results)
    assert lines
    assert "tokens/s" in tables(lines)
    assert all(json.loads(json.dumps(line))["date"] for line in lines)


def test_phases_time_the_outermost_call_and_leave_no_trace(monkeypatch: pytest.MonkeyPatch):
    class Sampler:
        def sample(self) -> int:
            return 7

    class Model:
        def forward(self, preprocess_only: bool = False) -> int:
            return Sampler().sample()

    calls = [(Model, "forward", "model"), (Sampler, "sample", "sampling")]
    monkeypatch.setattr("throughput_breakdown._calls", lambda: calls)
    before = Model.forward
    with Phases(on_gpu=False) as phases:
        assert Model().forward() == 7
        Model().forward(preprocess_only=True)
        Sampler().sample()
    assert Model.forward is before
    rows = [line.split(" | ")[:2] for line in phases.table(1.0, 2).splitlines()[2:]]
    assert rows[:3] == [["| model", "1"], ["| prefill", "1"], ["| sampling", "1"]]
