import json
from pathlib import Path

import pytest
from features import features, parse, read_results, run, table


def small_run(toy: Path, results: Path, *more: str) -> int:
    small = ["--batch", "4", "--rows", "4", "--most-tokens", "6", "--device", "cpu"]
    return run(parse([str(toy), *small, "--results", str(results), *more]))


def test_every_feature_is_measured_beside_a_plain_run(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """No row ends early: the work is the same with a feature and without."""
    results = tmp_path / "features.jsonl"
    assert small_run(toy, results) == 0
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [line["feature"] for line in lines] == list(features())
    for line in lines:
        assert line["completion_tokens"] == line["tokens_wanted"] == 24
        mean = (line["plain_before"] + line["plain_after"]) / 2
        assert line["ratio"] == pytest.approx(line["tokens_per_second"] / mean, abs=1e-3)
    assert [a["plain_after"] for a in lines[:-1]] == [b["plain_before"] for b in lines[1:]]
    assert "ended early" not in capsys.readouterr().out


def test_the_last_measurement_counts(toy: Path, tmp_path: Path):
    results = tmp_path / "features.jsonl"
    for _ in range(2):
        small_run(toy, results, "--features", "logprobs_5", "--sampling", "greedy")
    [line] = read_results(results)
    text = table([line])
    assert f"| logprobs_5 | {line['tokens_per_second']:,.0f} |" in text
    assert f"| {line['ratio']:.1%} |" in text


def test_an_unknown_feature_is_named(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse(["model", "--features", "magic"])
    assert "invalid choice: 'magic'" in capsys.readouterr().err
