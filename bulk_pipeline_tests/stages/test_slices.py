"""A partition answered in slices is the partition as one process makes it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bulk_pipeline.engine.loading import load_generator
from bulk_pipeline.spec import BulkInferenceSpec, load_spec
from bulk_pipeline.stages.complete import begin_slices, complete_partition, complete_slice
from bulk_pipeline.stages.format import format_partition
from bulk_pipeline.stages.generator_protocol import Generator
from bulk_pipeline.stages.ingest import ingest_partition
from bulk_pipeline.stages.journal import Journal
from bulk_pipeline.stages.stage_report import StageReport
from bulk_pipeline.stages.stored import MAX_ATTEMPTS
from bulk_pipeline.status import RUNNING, STOPPED, read_status
from bulk_pipeline.storage.schemas import COMPLETIONS, SLICES
from bulk_pipeline.storage.store import Store
from bulk_pipeline_tests.factories import (
    KEY,
    EchoGenerator,
    make_prompt,
    make_spec,
    make_store,
    read_rows,
    stable,
    write_prompts,
)
from bulk_pipeline_tests.stages.test_conversations import ChatGenerator, make_turns

NUM_ROWS = 60
SLICE = """
import json, sys
import torch
from bulk_pipeline.engine.loading import load_generator
from bulk_pipeline.spec import load_spec
from bulk_pipeline.stages.complete import complete_slice
from bulk_pipeline.storage.store import Store

torch.set_num_threads(1)
spec = load_spec(json.loads(sys.argv[1]))
store = Store(spec.output.root, spec.name)
number, of = int(sys.argv[2]), int(sys.argv[3])
load = lambda: load_generator(spec.generator)
print(json.dumps(complete_slice(spec, store, "all", number, of, load, "model").metadata))
"""


def no_generator() -> Any:
    raise AssertionError("nothing is left to run")


@pytest.fixture
def spec(any_root: str) -> BulkInferenceSpec:
    return make_spec(any_root)


@pytest.fixture
def store(spec: BulkInferenceSpec) -> Store:
    return make_store(spec)


def answer(
    spec: BulkInferenceSpec, store: Store, number: int, of: int, generator: Any = None
) -> StageReport:
    generator = generator or EchoGenerator()
    return complete_slice(spec, store, KEY, number, of, lambda: generator, "model")


def finish(spec: BulkInferenceSpec, store: Store, generator: Any = None, **kwargs: Any) -> Any:
    get = (lambda: generator) if generator else no_generator
    return complete_partition(spec, store, KEY, get, "model", **kwargs)


def make_dataset(folder: Path, model: Path, **sampling: Any) -> tuple[BulkInferenceSpec, Store]:
    """Rows of a file up to their prompts: some equal, some that cannot run, two samples each."""
    folder.mkdir()
    rows = [{"text": f"question {number % 50}"} for number in range(NUM_ROWS)] + [{"text": None}]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    spec = load_spec(
        {
            "name": "data",
            "source": {"path": str(folder / "rows.jsonl")},
            "prompt": {"column": "text"},
            "sampling": {"max_new_tokens": 8, "n": 2, **sampling},
            "generator": {"model": str(model), "device": "cpu", "dtype": "float64",
                          "cache_tokens": 2048, "max_batch_size": 4},
            "output": {"root": str(folder / "tables"), "flush_rows": 5},
        }
    )  # fmt: skip
    store = Store(spec.output.root, spec.name)
    assert spec.generator is not None
    ingest_partition(spec, store, KEY)
    format_partition(spec, store, KEY, spec.generator)
    return spec, store


@pytest.fixture(scope="module")
def generator(toy_float64: Path) -> Generator:
    spec = make_spec("x", generator={"model": str(toy_float64), "device": "cpu",
                                     "dtype": "float64", "max_batch_size": 4})  # fmt: skip
    assert spec.generator is not None
    return load_generator(spec.generator)


@pytest.mark.parametrize("of", [2, 3])
@pytest.mark.parametrize("temperature", [0, 1], ids=["greedy", "sampled"])
def test_slices_are_the_partition(tmp_path, toy_float64, generator, temperature, of):
    spec, store = make_dataset(tmp_path / "sliced", toy_float64, temperature=temperature)
    whole, whole_store = make_dataset(tmp_path / "whole", toy_float64, temperature=temperature)
    expected = finish(whole, whole_store, generator)
    reports = [answer(spec, store, number, of, generator) for number in range(1, of + 1)]
    assert store.partition(COMPLETIONS, KEY).manifest() is None
    report = finish(spec, store)
    assert stable(read_rows(store, COMPLETIONS)) == stable(read_rows(whole_store, COMPLETIONS))
    ran = [each.metadata["requests_run"] for each in reports]
    assert sum(ran) == expected.metadata["requests_run"] > 0
    assert min(ran) > 0.15 * sum(ran)
    assert report.metadata["requests_run"] == 0
    assert report.metadata["requests_from_slices"] == 2 * NUM_ROWS
    made = {row["produced_by"] for row in read_rows(store, COMPLETIONS) if row["request_key"]}
    assert made == {json.dumps(generator.provenance, sort_keys=True)}
    manifest = store.partition(COMPLETIONS, KEY).complete_manifest()
    assert sum(run["done"] for run in manifest.meta["runs"]) == sum(ran)
    assert store.partition_keys(SLICES) == [KEY]
    assert store.slices(KEY) == []
    assert finish(spec, store).metadata["requests_run"] == 0


def start(spec: BulkInferenceSpec, number: int, of: int, fault: str = "") -> subprocess.Popen[str]:
    values = json.dumps(spec.model_dump(mode="json", exclude_unset=True))
    command = [sys.executable, "-c", SLICE, values, str(number), str(of)]
    environment = os.environ | {"BULK_PIPELINE_FAULT": fault}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
def test_a_slice_that_is_killed_goes_on(tmp_path, toy_float64, generator):
    spec, store = make_dataset(tmp_path / "sliced", toy_float64, temperature=1)
    whole, whole_store = make_dataset(tmp_path / "whole", toy_float64, temperature=1)
    expected = finish(whole, whole_store, generator).metadata["requests_run"]
    first, second = start(spec, 1, 2), start(spec, 2, 2, "journal append:40:KILL")
    output, _ = first.communicate(timeout=240)
    second.communicate(timeout=240)
    assert (first.returncode, second.returncode) == (0, -9)
    half = store.slice(KEY, 2, 2).manifest()
    assert half is not None
    assert half.num_rows > 0
    assert [each.state for each in read_status(store)] == [STOPPED]
    rest = start(spec, 2, 2)
    again, _ = rest.communicate(timeout=240)
    ran = json.loads(output)["requests_run"] + half.num_rows + json.loads(again)["requests_run"]
    assert ran == expected, "what was stored did not run again"
    finish(spec, store)
    assert stable(read_rows(store, COMPLETIONS)) == stable(read_rows(whole_store, COMPLETIONS))


def test_what_a_slice_left_is_answered_at_the_end(spec, store):
    write_prompts(store, [make_prompt(i) for i in range(40)])
    answered = answer(spec, store, 1, 2).metadata["requests_run"]
    generator = EchoGenerator()
    report = finish(spec, store, generator)
    assert len(generator.requests) == report.metadata["requests_run"] == 40 - answered
    assert [row["completion"] for row in read_rows(store, COMPLETIONS)] == [
        f"1 2 3 {i}" for i in range(40)
    ]


def test_another_cut_goes_on_with_what_is_there(spec, store):
    write_prompts(store, [make_prompt(i) for i in range(40)])
    generator = EchoGenerator()
    answer(spec, store, 1, 2, generator)
    for number in (1, 2, 3):
        answer(spec, store, number, 3, generator)
    assert len(generator.requests) == 40
    finish(spec, store)


def test_answers_of_the_partition_and_of_others_are_not_made_again(spec, store):
    write_prompts(store, [make_prompt(i) for i in range(10)])
    finish(spec, store, EchoGenerator())
    write_prompts(store, [make_prompt(i) for i in range(20, 30)], key="other", renumber=True)
    complete_partition(spec, store, "other", EchoGenerator, "model")
    write_prompts(store, [make_prompt(i) for i in range(40)])
    generator = EchoGenerator()
    for number in (1, 2):
        answer(spec, store, number, 2, generator)
    asked = sorted(request.input_ids[-1] for request in generator.requests)
    assert asked == [*range(10, 20), *range(30, 40)]
    finish(spec, store)
    assert len(read_rows(store, COMPLETIONS)) == 40


def test_conversations_stay_together(spec, store):
    rows = [make_turns(i, 50 + i, 60) for i in range(8)] + [make_prompt(8)]
    write_prompts(store, rows)
    generator = ChatGenerator()
    for number in (1, 2):
        answer(spec, store, number, 2, generator)
    finish(spec, store)
    sliced = stable(read_rows(store, COMPLETIONS))
    assert len(sliced) == 25
    finish(spec, store, ChatGenerator(), redo="all")
    assert stable(read_rows(store, COMPLETIONS)) == sliced


def test_a_redo_is_done_in_slices_and_goes_on(spec, store):
    write_prompts(store, [make_prompt(i) for i in range(20)])
    finish(spec, store, EchoGenerator())
    answer(spec, store, 1, 2)  # an earlier run's, which the redo does not take
    begin_slices(store, KEY, ["all"])
    assert store.slices(KEY) == []
    generator = EchoGenerator()
    answer(spec, store, 1, 2, generator)
    begin_slices(store, KEY, ["all"])  # after a crash, say
    for number in (1, 2):
        answer(spec, store, number, 2, generator)
    assert len(generator.requests) == 20
    finish(spec, store, redo=["all"])
    assert finish(spec, store).metadata["requests_run"] == 0


def test_a_redo_that_broke_off_as_it_began_takes_no_earlier_answers(spec, store, monkeypatch):
    write_prompts(store, [make_prompt(i) for i in range(20)])
    finish(spec, store, EchoGenerator())
    answer(spec, store, 1, 2)

    def interrupt(journal: Journal, keys: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "forget", interrupt)
        with pytest.raises(KeyboardInterrupt):
            finish(spec, store, EchoGenerator(), redo="all")
    generator = EchoGenerator()
    finish(spec, store, generator, redo="all")
    assert len(generator.requests) == 20


def test_errors_of_slices_count_as_tried(spec, store):
    write_prompts(store, [make_prompt(i) for i in range(10)])
    for _ in range(MAX_ATTEMPTS):
        for number in (1, 2):
            answer(spec, store, number, 2, EchoGenerator(errors_at=[4]))
    finish(spec, store)
    [failed] = [row for row in read_rows(store, COMPLETIONS) if row["status"] == "error"]
    assert (failed["row_index"], failed["error"], failed["attempts"]) == (4, "broken", MAX_ATTEMPTS)


def test_an_error_that_a_slice_repaired_is_none(spec, store):
    write_prompts(store, [make_prompt(i) for i in range(10)])
    for generator in (EchoGenerator(errors_at=range(10)), EchoGenerator()):
        for number in (1, 2):
            answer(spec, store, number, 2, generator)
    finish(spec, store)
    assert {row["status"] for row in read_rows(store, COMPLETIONS)} == {"stop"}


def test_a_slice_has_one_writer(tmp_path):
    spec = make_spec(tmp_path)
    store = make_store(spec)
    write_prompts(store, [make_prompt(i) for i in range(10)])
    with store.slice(KEY, 1, 2).writer():
        answer(spec, store, 2, 2)
        with pytest.raises(RuntimeError, match=r"data/completions/all \(slice 1-of-2\) is being w"):
            answer(spec, store, 1, 2)
        finish(spec, store, EchoGenerator())
        assert [each.slice_name for each in store.slices(KEY)] == ["1-of-2"]


def test_the_status_adds_slices_up(spec, store):
    write_prompts(store, [make_prompt(i) for i in range(40)])
    answer(spec, store, 2, 2)
    seen = []

    def look(progress: Any) -> None:
        seen.extend(read_status(store))

    generator = EchoGenerator()
    complete_slice(spec, store, KEY, 1, 2, lambda: _Looking(generator, look), "model")
    [status, *_] = [each for each in seen if each.progress and each.progress["seconds"]]
    assert status.state == RUNNING
    assert status.progress is not None
    assert status.progress["requests"] == 40
    assert status.table == COMPLETIONS


class _Looking:
    """A generator around another that lets somebody look after each completion."""

    def __init__(self, generator: Any, look: Any):
        self.provenance, self._generator, self._look = generator.provenance, generator, look

    def run(self, requests: Any, on_step: Any = None) -> Any:
        for completion in self._generator.run(requests, on_step):
            yield completion
            self._look(None)
