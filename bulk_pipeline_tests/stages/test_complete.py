import errno
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulk_pipeline.engine.loading import load_generator
from bulk_pipeline.engine.request import Completion, Status
from bulk_pipeline.spec import GeneratorSettings
from bulk_pipeline.stages import dealing as dealing_module
from bulk_pipeline.stages import stored as stored_module
from bulk_pipeline.stages.complete import complete_partition
from bulk_pipeline.stages.sink import PartSink
from bulk_pipeline.stages.stage_report import StageReport
from bulk_pipeline.stages.stored import MAX_ATTEMPTS
from bulk_pipeline.storage.schemas import COMPLETIONS
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


@pytest.fixture
def spec(tmp_path):
    return make_spec(tmp_path)


@pytest.fixture
def store(spec):
    return make_store(spec)


def complete(spec, store, generator=None, fingerprint="model", **kwargs) -> StageReport:
    generator = generator or EchoGenerator()
    return complete_partition(spec, store, KEY, lambda: generator, fingerprint, **kwargs)


def texts(store) -> list[str | None]:
    return [row["completion"] for row in read_rows(store, COMPLETIONS)]


def test_each_request_is_answered_once_in_order(spec, store):
    write_prompts(store, [make_prompt(i) for i in range(25)])
    report = complete(spec, store)
    rows = read_rows(store, COMPLETIONS)
    assert [row["row_index"] for row in rows] == list(range(25))
    assert [row["row_id"] for row in rows] == [f"row-{i}" for i in range(25)]
    assert [row["completion"] for row in rows] == [f"1 2 3 {i}" for i in range(25)]
    assert {row["produced_by"] for row in rows} == {'{"generator": "echo"}'}
    assert report.rows == 25
    assert report.metadata["requests_run"] == 25
    assert report.metadata["status_stop"] == 25


def test_rows_that_cannot_run_keep_their_status_and_never_reach_the_model(spec, store):
    bad = [
        make_prompt(1, status="invalid", error="not text", input_ids=[]),
        make_prompt(2, status="empty", error="no text", input_ids=[]),
        make_prompt(3, status="too_long", error="9 tokens over", num_samples=2),
    ]
    write_prompts(store, [make_prompt(0), *bad])
    generator = EchoGenerator()
    complete(spec, store, generator)
    found = [(r["status"], r["error"], r["sample_index"]) for r in read_rows(store, COMPLETIONS)]
    assert found == [
        ("stop", None, 0),
        ("invalid", "not text", 0),
        ("empty", "no text", 0),
        ("too_long", "9 tokens over", 0),
        ("too_long", "9 tokens over", 1),
    ]
    assert len(generator.requests) == 1


def test_a_partition_of_no_rows_is_completed_without_the_model(spec, store):
    write_prompts(store, [])
    report = complete_partition(
        spec, store, KEY, lambda: pytest.fail("the model was loaded"), "model"
    )
    assert report.rows == 0
    assert read_rows(store, COMPLETIONS) == []


def test_samples_have_seeds_of_their_own(spec, store):
    sampling = {"temperature": 1.0}
    write_prompts(store, [make_prompt(i, num_samples=3, sampling=sampling) for i in range(2)])
    complete(spec, store)
    rows = read_rows(store, COMPLETIONS)
    assert [(r["row_index"], r["sample_index"]) for r in rows] == [
        (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2),
    ]  # fmt: skip
    assert len({row["seed"] for row in rows}) == 6
    assert all(row["completion"].endswith(f"seed {row['seed']}") for row in rows)


def test_equal_greedy_requests_run_once_and_fan_out(spec, store):
    same = [make_prompt(i, input_ids=[7, 7], num_samples=2) for i in range(3)]
    write_prompts(store, [*same, make_prompt(3, input_ids=[7, 7], sampling={"max_new_tokens": 9})])
    generator = EchoGenerator()
    report = complete(spec, store, generator)
    assert len(generator.requests) == 2  # one a limit
    assert texts(store) == ["7 7"] * 7
    assert [row["row_id"] for row in read_rows(store, COMPLETIONS)] == [
        "row-0", "row-0", "row-1", "row-1", "row-2", "row-2", "row-3",
    ]  # fmt: skip
    assert report.metadata["requests_shared"] == 5


def test_a_second_run_runs_nothing(spec, store):
    write_prompts(store, [make_prompt(i) for i in range(5)])
    complete(spec, store)
    before = store.partition(COMPLETIONS, KEY).manifest().parts
    report = complete_partition(
        spec, store, KEY, lambda: pytest.fail("the model was loaded"), "model"
    )
    assert report.metadata["requests_reused"] == 5
    assert store.partition(COMPLETIONS, KEY).manifest().parts == before


@pytest.mark.parametrize(
    ("change", "num_run"),
    [
        ({"sampling": {"max_new_tokens": 20}}, 0),  # it had stopped by itself within 8
        ({"sampling": {"max_new_tokens": 2}}, 1),  # it took 4
        ({"sampling": {"min_new_tokens": 1}}, 1),
        ({"sampling": {"stop": ["x"]}}, 1),
        ({"sampling": {"top_p": 0.5}}, 0),  # greedy: without effect
        ({"sampling": {"temperature": 0.5}}, 1),
        ({"input_ids": [1, 2, 3, 99]}, 1),
        ({"row_id": "renamed"}, 0),
    ],
)
def test_only_a_changed_request_runs_again(spec, store, change, num_run):
    rows = [make_prompt(i) for i in range(4)]
    write_prompts(store, rows)
    complete(spec, store)
    write_prompts(store, [*rows[:3], make_prompt(3, **change)])
    generator = EchoGenerator()
    complete(spec, store, generator)
    assert len(generator.requests) == num_run
    found = read_rows(store, COMPLETIONS)
    assert [row["row_index"] for row in found] == [0, 1, 2, 3]
    assert found[3]["row_id"] == change.get("row_id", "row-3")


def test_another_model_runs_everything_again(spec, store):
    write_prompts(store, [make_prompt(i) for i in range(4)])
    complete(spec, store)
    generator = EchoGenerator()
    complete(spec, store, generator, fingerprint="another")
    assert len(generator.requests) == 4
    assert len(read_rows(store, COMPLETIONS)) == 4


def test_reordered_grown_and_shrunk_rows_keep_their_answers(spec, store):
    write_prompts(store, [make_prompt(i) for i in range(6)])
    complete(spec, store)
    order = [5, 9, 3, 0, 8]
    write_prompts(
        store,
        [
            make_prompt(place, row_id=f"row-{i}", input_ids=[1, 2, 3, i])
            for place, i in enumerate(order)
        ],
    )
    generator = EchoGenerator()
    complete(spec, store, generator)
    assert [request.input_ids[-1] for request in generator.requests] == [9, 8]
    rows = read_rows(store, COMPLETIONS)
    assert [(r["row_index"], r["row_id"]) for r in rows] == [
        (place, f"row-{i}") for place, i in enumerate(order)
    ]
    assert texts(store) == [f"1 2 3 {i}" for i in order]


def test_what_finished_before_a_failure_is_not_run_again(tmp_path):
    spec = make_spec(tmp_path, output={"flush_rows": 2})
    store = make_store(spec)
    write_prompts(store, [make_prompt(i) for i in range(10)])
    broken = EchoGenerator(fails_at=[7])
    with pytest.raises(RuntimeError, match="the generator broke"):
        complete(spec, store, broken)
    assert not store.partition(COMPLETIONS, KEY).manifest().complete
    rest = EchoGenerator()
    complete(spec, store, rest)
    assert [request.input_ids[-1] for request in rest.requests] == [6, 7, 8, 9]
    resumed = stable(read_rows(store, COMPLETIONS))

    other = make_spec(tmp_path / "uninterrupted")
    write_prompts(make_store(other), [make_prompt(i) for i in range(10)])
    complete(other, make_store(other))
    assert resumed == stable(read_rows(make_store(other), COMPLETIONS))


def test_an_error_is_tried_again_until_it_has_failed_often_enough(spec, store):
    write_prompts(store, [make_prompt(i) for i in range(3)])
    for attempt in range(1, MAX_ATTEMPTS + 1):
        generator = EchoGenerator(errors_at=[1])
        complete(spec, store, generator)
        assert len(generator.requests) == (3 if attempt == 1 else 1)
        rows = read_rows(store, COMPLETIONS)
        assert [row["status"] for row in rows] == ["stop", "error", "stop"]
        assert rows[1]["attempts"] == attempt
    generator = EchoGenerator()
    complete(spec, store, generator)
    assert generator.requests == []


def test_an_error_that_is_overcome_gives_way_to_the_answer(spec, store):
    write_prompts(store, [make_prompt(i) for i in range(2)])
    complete(spec, store, EchoGenerator(errors_at=[1]))
    complete(spec, store)
    assert texts(store) == ["1 2 3 0", "1 2 3 1"]


def test_too_many_rows_without_an_answer_fail_the_partition_before_the_model_loads(tmp_path):
    spec = make_spec(tmp_path, output={"max_error_rate": 0.25})
    store = make_store(spec)
    write_prompts(store, [make_prompt(i, status="invalid") for i in range(2)] + [make_prompt(2)])
    with pytest.raises(ValueError, match=r"2 of 3 requests have no answer.*max_error_rate"):
        complete_partition(spec, store, KEY, lambda: pytest.fail("model was loaded"), "model")


def test_too_many_errors_fail_the_partition_and_keep_the_answers(tmp_path):
    spec = make_spec(tmp_path, output={"max_error_rate": 0.25})
    store = make_store(spec)
    write_prompts(store, [make_prompt(i) for i in range(3)])
    with pytest.raises(ValueError, match=r"1 of 3 requests have no answer"):
        complete(spec, store, EchoGenerator(errors_at=[1]))
    assert not store.partition(COMPLETIONS, KEY).manifest().complete
    generator = EchoGenerator()
    complete(spec, store, generator)
    assert len(generator.requests) == 1
    assert store.partition(COMPLETIONS, KEY).manifest().complete


def test_a_cache_too_small_for_the_longest_prompt_is_refused_before_the_model_loads(spec, store):
    write_prompts(store, [make_prompt(0, input_ids=list(range(600)))])
    with pytest.raises(ValueError, match=r"cache_tokens must hold .*608 tokens\), got 512; raise"):
        complete_partition(
            spec, store, KEY, lambda: pytest.fail("model was loaded"), "model", cache_tokens=512
        )


@pytest.mark.parametrize("content", ["", "{", '{"table": 1}'])
def test_a_damaged_manifest_costs_no_answer(spec, store, content):
    write_prompts(store, [make_prompt(i) for i in range(5)])
    complete(spec, store)
    before = stable(read_rows(store, COMPLETIONS))
    partition = store.partition(COMPLETIONS, KEY)
    with open(f"{partition.path}/manifest.json", "w", encoding="utf-8") as file:
        file.write(content)
    report = complete_partition(spec, store, KEY, lambda: pytest.fail("model was loaded"), "model")
    assert report.metadata["requests_reused"] == 5
    assert len(report.metadata["files_set_aside"]) == 1
    assert stable(read_rows(store, COMPLETIONS)) == before


def test_a_lost_part_is_named(spec, store, caplog):
    write_prompts(store, [make_prompt(i) for i in range(3)])
    complete(spec, store)
    partition = store.partition(COMPLETIONS, KEY)
    (part,) = partition.complete_manifest().parts
    partition.delete(part.name)
    report = complete(spec, store)
    assert report.metadata["requests_run"] == 3
    assert report.metadata["parts_lost"] == [f"{partition.part_path(part)} is missing"]
    assert "is missing; the requests that it answered run again" in caplog.text


def test_missing_prompts_are_named(spec, store):
    with pytest.raises(ValueError, match="partition all of prompts is missing; materialise"):
        complete(spec, store)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.integers(0, 5),  # prompt
            st.integers(1, 3),  # samples
            st.sampled_from([0.0, 1.0]),
            st.sampled_from(["ready", "invalid"]),
        ),
        max_size=12,
    ),
    again=st.lists(st.integers(0, 11), max_size=12),
    flush_rows=st.integers(1, 5),
    fails_at=st.none() | st.integers(0, 5),
)
def test_any_dataset_comes_out_as_asked_for_whatever_ran_before(
    tmp_path_factory, rows, again, flush_rows, fails_at
):
    """Interrupted, re-ordered, shrunk, grown: the table equals that of one run from nothing."""
    root = tmp_path_factory.mktemp("any")

    def prompts(choice: list[int]) -> list[dict[str, Any]]:
        return [
            make_prompt(
                place,
                row_id=f"row-{number}",
                input_ids=[1 + rows[number][0]],
                num_samples=rows[number][1],
                sampling={"temperature": rows[number][2]},
                status=rows[number][3],
            )
            for place, number in enumerate(choice)
        ]

    spec = make_spec(root, output={"flush_rows": flush_rows})
    store = make_store(spec)
    write_prompts(store, prompts(list(range(len(rows)))))
    try:
        complete(spec, store, EchoGenerator(fails_at=[fails_at] if fails_at else []))
    except RuntimeError:
        pass
    second = list(dict.fromkeys(n for n in again if n < len(rows)))
    write_prompts(store, prompts(second))
    complete(spec, store)
    fresh_spec = make_spec(root / "fresh")
    write_prompts(make_store(fresh_spec), prompts(second))
    complete(fresh_spec, make_store(fresh_spec))
    assert stable(read_rows(store, COMPLETIONS)) == stable(
        read_rows(make_store(fresh_spec), COMPLETIONS)
    )


# --- redo ----------------------------------------------------------------------------------------


def reasons(report: StageReport) -> dict[str, int]:
    prefix = "requests_run_"
    return {k.removeprefix(prefix): v for k, v in report.metadata.items() if k.startswith(prefix)}


def test_redo_all_runs_everything_once_more(spec, store):
    write_prompts(store, [make_prompt(i) for i in range(4)])
    complete(spec, store)
    report = complete(spec, store, redo="all")
    assert reasons(report) == {"redo": 4}
    assert len(read_rows(store, COMPLETIONS)) == 4
    assert complete(spec, store).metadata["requests_run"] == 0  # it is over
    assert complete(spec, store, redo="all").metadata["requests_run"] == 4  # asked for anew


def test_redo_of_a_status_runs_its_rows_alone(spec, store):
    write_prompts(store, [make_prompt(i) for i in range(4)])
    for _ in range(MAX_ATTEMPTS):
        complete(spec, store, EchoGenerator(errors_at=[1, 2]))
    assert complete(spec, store).metadata["requests_run"] == 0  # they have failed often enough
    report = complete(spec, store, EchoGenerator(errors_at=[2]), redo=["error"])
    assert reasons(report) == {"redo": 2}
    rows = read_rows(store, COMPLETIONS)
    assert [row["status"] for row in rows] == ["stop", "stop", "error", "stop"]
    assert rows[2]["attempts"] == 1


@pytest.mark.parametrize("asked_again", ["all", "none"])
def test_a_redo_that_broke_off_goes_on_where_it_was(tmp_path, asked_again):
    spec = make_spec(tmp_path, output={"flush_rows": 2})
    store = make_store(spec)
    write_prompts(store, [make_prompt(i) for i in range(8)])
    complete(spec, store)
    with pytest.raises(RuntimeError, match="the generator broke"):
        complete(spec, store, EchoGenerator(fails_at=[5]), redo="all")
    rest = EchoGenerator()
    report = complete(spec, store, rest, redo=asked_again)
    assert [request.input_ids[-1] for request in rest.requests] == [4, 5, 6, 7]
    assert reasons(report) == {"redo": 4}
    assert complete(spec, store).metadata["requests_run"] == 0


def test_old_answers_are_kept_until_the_redo_is_complete(spec, store):
    write_prompts(store, [make_prompt(i) for i in range(4)])
    complete(spec, store)
    before = store.partition(COMPLETIONS, KEY).manifest().parts
    with pytest.raises(RuntimeError, match="the generator broke"):
        complete(spec, store, EchoGenerator(fails_at=[0]), redo="all")
    assert store.partition(COMPLETIONS, KEY).manifest().parts[:1] == before


@pytest.mark.parametrize("redo", ["errors", ["stop", "nothing"], ["ready"]])
def test_redo_of_an_unknown_status_is_refused(spec, store, redo):
    write_prompts(store, [make_prompt(0)])
    with pytest.raises(ValueError, match="redo must be none, all or statuses out of .* got"):
        complete(spec, store, redo=redo)


# --- why requests run ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "fingerprint", "expected"),
    [
        ({}, "model", {}),
        ({"input_ids": [5]}, "model", {"prompt_changed": 1}),
        ({"row_id": "another", "input_ids": [5]}, "model", {"new": 1}),
        ({"sampling": {"max_new_tokens": 2}}, "model", {"limit_changed": 1}),
        ({"input_ids": [5]}, "model 2", {"model_changed": 2}),
    ],
    ids=str,
)
def test_the_report_says_why_requests_run(spec, store, change, fingerprint, expected):
    write_prompts(store, [make_prompt(0), make_prompt(1)])
    assert reasons(complete(spec, store)) == {"new": 2}
    write_prompts(store, [make_prompt(0), make_prompt(1, **change)])
    assert reasons(complete(spec, store, fingerprint=fingerprint)) == expected


def test_a_retried_error_and_changed_sampling_are_told_apart(spec, store):
    def prompts(temperature: float) -> None:
        rows = [make_prompt(i, sampling={"temperature": temperature}) for i in range(2)]
        write_prompts(store, rows, inputs={"sampling": {"temperature": temperature}})

    prompts(0.0)
    complete(spec, store, EchoGenerator(errors_at=[1]))
    assert reasons(complete(spec, store)) == {"error_retried": 1}
    prompts(0.5)
    assert reasons(complete(spec, store)) == {"sampling_changed": 2}


# --- other partitions ----------------------------------------------------------------------------


def test_answers_are_found_in_other_partitions(any_root):
    """By file, then by rows: the same prompts in other partitions, and one new."""
    spec = make_spec(any_root)
    store = make_store(spec)
    for key, places in (("a", range(3)), ("b", range(3, 8))):
        write_prompts(store, [make_prompt(i) for i in places], key=key, renumber=True)
        complete_partition(spec, store, key, EchoGenerator, "model")
    rest = EchoGenerator()
    for key, places in (("rows-0", range(4)), ("rows-1", range(4, 9))):
        write_prompts(store, [make_prompt(i) for i in places], key=key, renumber=True)
        report = complete_partition(spec, store, key, lambda: rest, "model")
        assert report.metadata["requests_copied"] == 4
        rows = read_rows(store, COMPLETIONS, key)
        assert [row["row_id"] for row in rows] == [f"row-{i}" for i in places]
        assert [row["row_index"] for row in rows] == list(range(len(places)))
        assert [row["completion"] for row in rows] == [f"1 2 3 {i}" for i in places]
    assert [request.input_ids[-1] for request in rest.requests] == [8]


def test_errors_are_not_taken_from_other_partitions_nor_anything_into_a_redo(any_root):
    spec = make_spec(any_root)
    store = make_store(spec)
    write_prompts(store, [make_prompt(i) for i in range(2)], key="a")
    for _ in range(MAX_ATTEMPTS):
        complete_partition(spec, store, "a", lambda: EchoGenerator(errors_at=[1]), "model")
    write_prompts(store, [make_prompt(i) for i in range(2)])
    assert complete(spec, store).metadata["requests_run"] == 1
    assert complete(spec, store, redo="all").metadata["requests_run"] == 2


def test_a_damaged_partition_is_passed_over(any_root):
    spec = make_spec(any_root)
    store = make_store(spec)
    write_prompts(store, [make_prompt(0)], key="a")
    complete_partition(spec, store, "a", EchoGenerator, "model")
    store.fs.pipe_file(f"{store.path}/completions/a/manifest.json", b"{")
    write_prompts(store, [make_prompt(1)], key="b", renumber=True)
    complete_partition(spec, store, "b", EchoGenerator, "model")
    write_prompts(store, [make_prompt(0), make_prompt(1)], renumber=True)
    report = complete(spec, store)
    assert report.metadata["requests_run"] == report.metadata["requests_copied"] == 1


def test_of_answers_in_several_partitions_the_first_one_counts(any_root):
    spec = make_spec(any_root)
    store = make_store(spec)

    class Named(EchoGenerator):
        def _answer(self, request):
            return replace(super()._answer(request), text=key)

    for key in ("b", "a", "c"):
        write_prompts(store, [make_prompt(0)], key=key)
        complete_partition(spec, store, key, Named, "model", redo="all")
    write_prompts(store, [make_prompt(0)])
    complete(spec, store)
    assert [row["completion"] for row in read_rows(store, COMPLETIONS)] == ["a"]


def test_a_request_that_the_engine_refuses_keeps_its_status(spec, store):
    class Refusing(EchoGenerator):
        def _answer(self, request):
            if request.input_ids[-1] == 1:
                return Completion(request.request_id, Status.TOO_LONG, error="9 tokens over")
            return super()._answer(request)

    write_prompts(store, [make_prompt(i) for i in range(3)])
    report = complete(spec, store, Refusing())
    assert report.metadata["status_too_long"] == 1
    assert [row["status"] for row in read_rows(store, COMPLETIONS)] == ["stop", "too_long", "stop"]


@pytest.mark.parametrize("order", ["rising", "falling", "mixed"])
def test_many_pieces_are_merged_in_order(tmp_path, monkeypatch, order):
    monkeypatch.setattr(dealing_module, "SORT_ROWS", 7)
    monkeypatch.setattr(dealing_module, "READ_ROWS", 3)
    monkeypatch.setattr(stored_module, "READ_ROWS", 4)

    class Reordering(EchoGenerator):
        def run(self, requests, on_step=None):
            places = {"rising": 1, "falling": -1, "mixed": 37}[order]
            every = list(requests)
            yield from map(self._answer, [every[i * places % 101] for i in range(101)])

    spec = make_spec(tmp_path, output={"flush_rows": 10})
    store = make_store(spec)
    write_prompts(store, [make_prompt(i) for i in range(101)])
    complete(spec, store, Reordering())
    assert texts(store) == [f"1 2 3 {i}" for i in range(101)]


def test_the_engine_is_free_for_the_next_partition_after_a_disk_error(tmp_path, toy, monkeypatch):
    """Also while somebody holds the error, and with it all that stood on the stack."""
    values = {"model": str(toy), "device": "cpu", "max_batch_size": 2, "cache_tokens": 1024}
    generator = load_generator(GeneratorSettings(**values))
    spec = make_spec(tmp_path, output={"flush_rows": 2})
    store = make_store(spec)
    for key in ("first", "second"):
        write_prompts(store, [make_prompt(i) for i in range(8)], key=key)
    with monkeypatch.context() as patch:
        patch.setattr(PartSink, "flush", full)
        with pytest.raises(OSError, match="the disk is full") as held:
            complete_partition(spec, store, "first", lambda: generator, "model")
    complete_partition(spec, store, "second", lambda: generator, "model")
    assert len(read_rows(store, COMPLETIONS, "second")) == 8
    assert held.value.errno == errno.ENOSPC
    generator.close()


def full(sink: PartSink) -> None:
    if sink._rows:
        raise OSError(errno.ENOSPC, "the disk is full")
