"""A row on which the model fails each time ends as an error; nothing else makes an error."""

import json
import logging
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice
from typing import Any

import dagster as dg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from bulk_pipeline import build_bulk_inference_defs
from bulk_pipeline.engine.errors import GenerationError
from bulk_pipeline.engine.request import Completion, Request
from bulk_pipeline.engine.stand_in import install_stand_in
from bulk_pipeline.plan import plan_partition
from bulk_pipeline.spec import BulkInferenceSpec
from bulk_pipeline.stages.complete import complete_partition, complete_slice
from bulk_pipeline.stages.journal import GIVE_UP_AFTER, JOURNAL, Journal
from bulk_pipeline.stages.sink import PartSink
from bulk_pipeline.stages.stage_report import StageReport
from bulk_pipeline.status import STOPPED, read_status, to_text
from bulk_pipeline.storage.schemas import COMPLETIONS, OUTPUT
from bulk_pipeline.storage.store import Store
from bulk_pipeline_tests.factories import (
    KEY,
    EchoGenerator,
    make_prompt,
    make_spec,
    make_store,
    read_rows,
    write_prompts,
)
from bulk_pipeline_tests.stages.test_conversations import ChatGenerator, make_turns

NUM_ROWS, BATCH = 20, 4
ALONE = "of the requests were in generation in 2 failed runs or more: they run last, one at a time"


class Failing(EchoGenerator):
    """Fails at a batch in which a prompt ends with one of `poison`.

    Parameters
    ----------
    poison
        None: at every batch.
    error
        What it raises then.
    is_fatal
        Whether it cannot be used any more then, as where the GPU is lost.
    """

    def __init__(
        self,
        poison: Collection[int] | None,
        error: Callable[[], BaseException] = lambda: GenerationError("the model failed: boom"),
        is_fatal: bool = False,
    ):
        super().__init__()
        self.poison, self.error, self.is_fatal, self.is_lost = poison, error, is_fatal, False

    def run(
        self, requests: Iterable[Request], on_step: Callable[[], None] | None = None
    ) -> Iterator[Completion]:
        if self.is_lost:
            raise RuntimeError("the GPU failed earlier")
        waiting = iter(requests)
        while batch := list(islice(waiting, BATCH)):
            self.requests += batch
            if any(map(self.fails_on, batch)):
                self.is_lost = self.is_fatal
                raise self.error()
            yield from map(self._answer, batch)

    def fails_on(self, request: Request) -> bool:
        if self.poison is None:
            return True
        return len(request.input_ids) > 1 and request.input_ids[-1] in self.poison


@pytest.fixture
def spec(any_root: str) -> BulkInferenceSpec:
    return make_spec(any_root)


@pytest.fixture
def store(spec: BulkInferenceSpec) -> Store:
    store = make_store(spec)
    write_prompts(store, [make_prompt(i) for i in range(NUM_ROWS)])
    return store


def complete(
    spec: BulkInferenceSpec, store: Store, generator: Any, redo: Any = "none"
) -> StageReport:
    return complete_partition(spec, store, KEY, lambda: generator, "model", redo=redo)


def count_failures(run: Callable[[], StageReport], most: int) -> int:
    """Run until that succeeds; how many runs failed before."""
    for number in range(most):
        try:
            run()
        except RuntimeError:
            continue
        return number
    run()
    return most


def statuses(store: Store) -> list[str]:
    return [row["status"] for row in read_rows(store, COMPLETIONS)]


def expected(poison: Collection[int], num_rows: int = NUM_ROWS) -> list[str]:
    return ["error" if number in poison else "stop" for number in range(num_rows)]


def journals(store: Store) -> list[str]:
    return [path for path in store.fs.find(store.path) if path.endswith(JOURNAL)]


def test_through_dagster_the_third_run_answers_the_rest(tmp_path, toy, monkeypatch, caplog):
    texts = [f"question {number}" for number in range(10)]
    texts[5] += " §"
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    spec = {
        "name": "data",
        "source": {"path": "rows.jsonl"},
        "prompt": {"column": "text"},
        "sampling": {"max_new_tokens": 4},
        "generator": {
            "model": str(toy),
            "device": "cpu",
            "cache_tokens": 1024,
            "max_batch_size": 2,
        },
    }
    install_stand_in()
    from bulk_pipeline.engine.forward import ChunkForward

    poison = AutoTokenizer.from_pretrained(toy).encode("§")[-1]
    prefill = ChunkForward.prefill

    def failing(self, token_ids, *rest):
        if poison in token_ids:
            raise RuntimeError("device-side assert\nCUDA errors might be reported later")
        prefill(self, token_ids, *rest)

    monkeypatch.setattr(ChunkForward, "prefill", failing)
    defs = build_bulk_inference_defs(spec, tmp_path)
    assert isinstance(defs.resources, dict)
    results = []
    with dg.DagsterInstance.ephemeral() as instance:
        defs.resolve_job_def("data_sync_partitions").execute_in_process(instance=instance)
        for _ in range(3):
            caplog.clear()
            result = dg.materialize(
                list(defs.assets or []),
                instance=instance,
                resources=defs.resources,
                partition_key=KEY,
                raise_on_error=False,
            )
            results.append(result)
    assert [result.success for result in results] == [False, False, True]
    for result in results[:2]:
        [failure] = [event for event in result.all_node_events if event.is_step_failure]
        message = failure.step_failure_data.error_display_string
        assert "the model failed in generation: RuntimeError: device-side assert" in message
    assert f"all: 4 {ALONE}" in caplog.text
    rows = read_rows(Store(str(tmp_path / "data" / "bulk"), "data"), OUTPUT)
    assert [row["text"] for row in rows] == texts
    assert [row["row_index"] for row in rows if row["status"] == "error"] == [5]
    assert rows[5]["error"].startswith("the model failed in generation: RuntimeError: device-side")
    assert "\n" not in rows[5]["error"]
    assert all(row["completion"] for row in rows[:5] + rows[6:])


@pytest.mark.parametrize("is_fatal", [False, True], ids=["usable after it", "GPU lost"])
@pytest.mark.parametrize("poison", [{5}, {0}, {19}, {0, 1}, {3, 17}, set(range(NUM_ROWS))], ids=str)
def test_the_rows_at_fault_are_found_out_and_the_others_answered(spec, store, poison, is_fatal):
    def run() -> StageReport:
        return complete(spec, store, Failing(poison, is_fatal=is_fatal))

    num_batches = len({number // BATCH for number in poison})
    most = 2 * num_batches + (len(poison) if is_fatal else 0)
    assert count_failures(run, most) >= 2
    rows = read_rows(store, COMPLETIONS)
    assert [row["status"] for row in rows] == expected(poison)
    for row in rows:
        if row["row_index"] in poison:
            assert row["attempts"] == 3
            assert row["error"].startswith("the model failed: boom; no other request was in it")
        else:
            assert row["completion"] == f"1 2 3 {row['row_index']}"
    assert journals(store) == []
    never = EchoGenerator()
    complete(spec, store, never)
    assert never.requests == [], "they are not tried again by themselves"
    complete(spec, store, EchoGenerator(), redo=["error"])
    assert statuses(store) == expected({})


def test_suspects_come_last_and_alone(spec, store):
    for _ in range(2):
        with pytest.raises(GenerationError, match="boom"):
            complete(spec, store, Failing({5}))
    generator = Failing({5})
    report = complete(spec, store, generator)
    assert report.metadata["requests_run_alone"] == BATCH
    asked = [request.input_ids for request in generator.requests]
    rest = [[1, 2, 3, number] for number in range(8, NUM_ROWS)]
    check = (0,)  # whether the engine works, before the first and after a failure
    suspects = [[1, 2, 3, number] for number in (4, 5, 6, 7)]
    assert asked == [*rest, check, *suspects[:2], check, *suspects[2:]]


def test_a_model_that_fails_on_everything_makes_no_row_an_error(spec, store):
    for _ in range(12):
        with pytest.raises(GenerationError, match="boom"):
            complete(spec, store, Failing(None))
    complete(spec, store, EchoGenerator())
    assert statuses(store) == expected({})
    assert journals(store) == []


@pytest.mark.parametrize(
    "error",
    [
        lambda: RuntimeError("out of GPU memory while generating"),
        MemoryError,
        KeyboardInterrupt,
        lambda: OSError("the disk is full"),
    ],
    ids=["GPU memory", "memory", "interrupt", "disk"],
)
def test_what_is_no_failure_of_the_model_counts_against_no_row(spec, store, error):
    for _ in range(2):
        with pytest.raises(GenerationError):
            complete(spec, store, Failing({5}))
    for _ in range(5):  # the suspect alone, too
        with pytest.raises(type(error())):
            complete(spec, store, Failing({5}, error))
    complete(spec, store, EchoGenerator())
    assert statuses(store) == expected({})


EVENTS = [KeyboardInterrupt, MemoryError, lambda: OSError("full"), lambda: RuntimeError("memory")]


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    poison=st.sets(st.integers(0, NUM_ROWS - 1), max_size=3),
    events=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, NUM_ROWS - 1)), max_size=6),
    flush_rows=st.sampled_from([1, 7, 100]),
)
def test_interrupted_anywhere_only_the_rows_at_fault_are_errors(poison, events, flush_rows):
    spec = make_spec(f"memory://failing-{uuid.uuid4().hex}", output={"flush_rows": flush_rows})
    store = make_store(spec)
    write_prompts(store, [make_prompt(i) for i in range(NUM_ROWS)])

    class Interrupted(Failing):
        def __init__(self, at: int, event: Callable[[], BaseException]):
            super().__init__(poison)
            self.at, self.event = at, event

        def _answer(self, request: Request) -> Completion:
            if len(request.input_ids) > 1 and request.input_ids[-1] == self.at:
                raise self.event()
            return super()._answer(request)

    for event, at in events:
        try:
            complete(spec, store, Interrupted(at, event))
        except (KeyboardInterrupt, Exception):
            continue
    count_failures(lambda: complete(spec, store, Failing(poison)), 2 * len(poison))
    assert statuses(store) == expected(poison)


class Death(BaseException):
    """The process ends: nothing of it runs any more."""


def die(spec: BulkInferenceSpec, store: Store, at: int) -> None:
    """A run that is killed with a request in generation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "close", lambda self: None)
        patch.setattr(PartSink, "flush", lambda self: None)
        with pytest.raises(Death):
            complete(spec, store, Failing({at}, Death))


def test_kills_by_chance_make_no_row_an_error(spec, store):
    for _ in range(GIVE_UP_AFTER - 1):
        die(spec, store, 4)  # twice with others, then alone
    die(spec, store, 5)  # 4 is answered alone before it, and that answer lost
    for _ in range(GIVE_UP_AFTER - 1):
        die(spec, store, 4)
    complete(spec, store, EchoGenerator())
    assert statuses(store) == expected({})
    assert journals(store) == []


def test_a_row_that_kills_its_process_each_time_is_an_error(spec, store):
    for _ in range(GIVE_UP_AFTER):
        die(spec, store, 4)
    complete(spec, store, Failing({4}, Death))
    assert statuses(store) == expected({4})
    assert (
        "5 runs failed with this request in generation" in read_rows(store, COMPLETIONS)[4]["error"]
    )


def test_a_later_turn_of_a_conversation_is_found_out(spec, store):
    class FailingChat(ChatGenerator):
        def _answer(self, request: Request) -> Completion:
            if request.input_ids[-1] == 61:
                raise GenerationError("the model failed: boom")
            return super()._answer(request)

    prompts = [make_turns(0, 50, 60), make_turns(1, 51, 61, 71), make_turns(2, 52, 62)]
    write_prompts(store, prompts)
    assert count_failures(lambda: complete(spec, store, FailingChat()), 2) == 2
    rows = read_rows(store, COMPLETIONS)
    found = [(row["row_index"], row["turn"], row["status"]) for row in rows]
    assert len(found) == 10
    assert [each for each in found if each[2] == "error"] == [(1, 2, "error"), (1, 3, "error")]
    assert "turn 2 ended as error" in rows[6]["error"]


def test_slices_find_it_out_too(spec, store):
    def answer(number: int) -> StageReport:
        return complete_slice(spec, store, KEY, number, 2, lambda: Failing({5}), "model")

    fails = [count_failures(lambda number=number: answer(number), 2) for number in (1, 2)]
    assert sorted(fails) == [0, 2]
    never = EchoGenerator()
    complete(spec, store, never)
    assert never.requests == []
    assert statuses(store) == expected({5})


def test_plan_and_status_and_the_log_say_so(spec, store, caplog, monkeypatch):
    for _ in range(2):
        assert plan_partition(spec, store, KEY, "model").notes == []
        with pytest.raises(GenerationError):
            complete(spec, store, Failing({5}))
    assert plan_partition(spec, store, KEY, "model").notes == [f"4 {ALONE}"]
    [running] = read_status(store)  # this process lives
    assert running.requests_alone == 0
    monkeypatch.setattr("bulk_pipeline.status.is_alive", lambda record: False)
    [status] = read_status(store)
    assert (status.state, status.requests_alone) == (STOPPED, 4)
    assert status.to_json()["requests_alone"] == 4
    assert f"all: 4 {ALONE}" in to_text("data", [status])
    with caplog.at_level(logging.WARNING):
        complete(spec, store, Failing({5}))
    assert f"all: 4 {ALONE}" in caplog.text
    assert "row 5 failed alone: the model failed: boom" in caplog.text
    assert plan_partition(spec, store, KEY, "model").notes == []
