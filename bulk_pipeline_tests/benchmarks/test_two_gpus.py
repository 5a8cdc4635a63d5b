import json
from pathlib import Path

import pytest
from two_gpus import main


@pytest.mark.slow
def test_two_processes_answer_partitions_and_slices(toy: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent.parent))
    results = tmp_path / "results.jsonl"
    settings = json.dumps({"cache_tokens": 2048, "dtype": "float64"})
    small = ["--rows", "6", "--device", "cpu", "--without-split", "--settings", settings]
    main([str(toy), *small, "--results", str(results)])
    [found] = map(json.loads, results.read_text().splitlines())
    one, two, sliced = found["one"], found["two"], found["sliced"]
    assert found["times_one"] == pytest.approx(
        two["tokens_per_second"] / one["tokens_per_second"], abs=1e-3
    )
    assert sliced["rows"] == 6
    assert sliced["same"] == 1
    assert sliced["requests_run_after"] == 0
    assert sliced["completion_tokens"] == one["completion_tokens"]
