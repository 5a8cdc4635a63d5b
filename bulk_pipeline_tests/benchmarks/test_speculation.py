import random
import sys

import pytest
import speculation


@pytest.mark.parametrize("work", ["edit", "few2"])
def test_a_run_measures_with_and_without_drafts(toy, tmp_path, capsys, monkeypatch, work):
    results = tmp_path / "results.jsonl"
    command = f"speculation.py run {toy} --device cpu --batches 1 2 --work {work} --fills 1"
    extra = f"--max-new-tokens 40 --sampling greedy --set cache_tokens=4096 --results {results}"
    monkeypatch.setattr(sys, "argv", [*command.split(), *extra.split()])
    assert speculation.main() == 0
    table = capsys.readouterr().out
    assert len(results.read_text().splitlines()) == 4
    rows = [line for line in table.splitlines() if f"| {work} | greedy | " in line]
    assert len(rows) == 2


def test_prompts_are_the_same_at_every_call(toy):
    first, second = (speculation.talk(str(toy), "story", 3, random.Random(1)) for _ in range(2))
    assert first == second
    assert len({tuple(ids) for ids in first}) == 3
