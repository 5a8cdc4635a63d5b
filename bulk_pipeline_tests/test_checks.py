"""Asset checks over several partitions: which of them fail, and why, is in the metadata."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from bulk_pipeline.checks import CHECKS, run_checks
from bulk_pipeline.spec import BulkInferenceSpec
from bulk_pipeline.stages.complete import complete_partition
from bulk_pipeline.stages.join import join_partition
from bulk_pipeline.storage.schemas import (
    COMPLETIONS,
    COMPLETIONS_SCHEMA,
    OUTPUT,
    PROMPTS,
    RAW_DATASET,
)
from bulk_pipeline.storage.store import Store
from bulk_pipeline_tests.factories import (
    EchoGenerator,
    make_prompt,
    make_spec,
    make_store,
    write_prompts,
    write_raw,
)

KEYS = ("a", "b", "c")


@pytest.fixture
def spec(tmp_path: Path) -> BulkInferenceSpec:
    return make_spec(tmp_path, output={"max_error_rate": 0.5})


@pytest.fixture
def store(spec: BulkInferenceSpec) -> Store:
    """Three partitions of four rows, done."""
    store = make_store(spec)
    for key in KEYS:
        finish(spec, store, key, [make_prompt(index) for index in range(4)])
    return store


def finish(spec: BulkInferenceSpec, store: Store, key: str, prompts: list[dict[str, Any]]) -> None:
    write_prompts(store, prompts, key)
    complete_partition(spec, store, key, EchoGenerator, "model")
    join_partition(spec, store, key)


def problems(spec: BulkInferenceSpec, store: Store, table: str, name: str) -> dict[str, Any]:
    """What a check found, by partition."""
    (result,) = [r for r in run_checks(spec, store, table, KEYS) if r.check_name == name]
    found = result.metadata["failing_partitions"].value
    assert result.passed == (not found)
    return found


def test_all_checks_pass_on_what_the_stages_write(spec: BulkInferenceSpec, store: Store) -> None:
    for table in CHECKS:
        results = run_checks(spec, store, table, KEYS)
        assert [r.check_name for r in results if not r.passed] == [], table
        assert [r.metadata["partitions"].value for r in results] == [3] * len(results), table


def test_repeated_ids_are_found(spec: BulkInferenceSpec, store: Store) -> None:
    rows = [{"text": "x", "row_id": "same", "row_index": index} for index in range(3)]
    write_raw(store, rows, pa.schema([("text", pa.string())]), "b")
    assert problems(spec, store, RAW_DATASET, "unique_row_ids") == {"b": "2 repeated"}


def test_a_partition_over_the_error_rate_is_named_though_it_is_unfinished(
    spec: BulkInferenceSpec, store: Store
) -> None:
    bad = [make_prompt(i, status="invalid" if i else "ready", error="no text") for i in range(4)]
    write_prompts(store, bad, "c")
    generous = spec.model_copy(
        update={"output": spec.output.model_copy(update={"max_error_rate": 1.0})}
    )
    complete_partition(generous, store, "c", EchoGenerator, "model")
    assert problems(spec, store, COMPLETIONS, "error_rate") == {"c": 0.75}
    (result,) = [
        r for r in run_checks(spec, store, COMPLETIONS, KEYS) if r.check_name == "error_rate"
    ]
    assert result.metadata["error_rate"].value == 3 / 12


def rewrite(store: Store, key: str, **changes: Any) -> None:
    """The stored completions with some values replaced."""
    partition = store.partition(COMPLETIONS, key)
    rows = [row | changes for batch in partition.read() for row in batch.to_pylist()]
    with partition.writer() as writer:
        with writer.new_part(COMPLETIONS_SCHEMA) as part:
            part.write(pa.Table.from_pylist(rows, schema=COMPLETIONS_SCHEMA))
        counts = {changes.get("status", "stop"): len(rows)}
        writer.commit([part.part], complete=True, meta={"status_counts": counts})


def test_answers_without_text_are_found(spec: BulkInferenceSpec, store: Store) -> None:
    rewrite(store, "a", completion="")
    assert problems(spec, store, COMPLETIONS, "empty_rate") == {"a": 1.0}


def test_answers_that_were_cut_off_are_found(spec: BulkInferenceSpec, store: Store) -> None:
    rewrite(store, "a", status="length")
    assert problems(spec, store, COMPLETIONS, "length_rate") == {"a": 1.0}


def test_answers_to_other_prompts_are_found(spec: BulkInferenceSpec, store: Store) -> None:
    write_prompts(store, [make_prompt(index) for index in range(4)], "b")
    assert list(problems(spec, store, COMPLETIONS, "matches_prompts")) == ["b"]


def test_lost_requests_are_found(spec: BulkInferenceSpec, store: Store) -> None:
    write_prompts(store, [make_prompt(index) for index in range(5)], "c")
    assert problems(spec, store, OUTPUT, "conservation") == {
        "c": {"raw_dataset": 5, "prompts": 5, "completions": 4, "output": 4, "requests": 5}
    }


@pytest.mark.parametrize("table", [RAW_DATASET, PROMPTS, COMPLETIONS, OUTPUT])
def test_a_column_of_another_type_is_found(
    spec: BulkInferenceSpec, store: Store, table: str
) -> None:
    schema = pa.schema([("row_id", pa.int64()), ("row_index", pa.int64())])
    with store.partition(table, "a").writer() as writer:
        with writer.new_part(schema) as part:
            part.write(pa.Table.from_pylist([{"row_id": 1, "row_index": 0}], schema=schema))
        writer.commit([part.part], complete=True)
    found = problems(spec, store, table, "schema")
    assert list(found) == ["a"]
    assert "row_id" in found["a"]
