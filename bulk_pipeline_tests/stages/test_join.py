import csv
import json
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest

from bulk_pipeline import scan_table
from bulk_pipeline.stages.complete import complete_partition
from bulk_pipeline.stages.join import join_partition, preview
from bulk_pipeline.storage.schemas import OUTPUT
from bulk_pipeline_tests.factories import (
    KEY,
    EchoGenerator,
    make_prompt,
    make_spec,
    make_store,
    read_rows,
    write_prompts,
    write_raw,
)

ROWS = [
    {"text": "plain", "tags": ["a"], "score": 1.5},
    {"text": 'quotes " and, commas\nand lines', "tags": [], "score": None},
    {"text": None, "tags": None, "score": 0.0},
    {"text": "عربي 🦜", "tags": ["é", "ü"], "score": -2.0},
]
SOURCE = pa.schema(
    [("text", pa.string()), ("tags", pa.list_(pa.string())), ("score", pa.float64())]
)


@pytest.fixture
def spec(tmp_path):
    return make_spec(tmp_path, output={"formats": ["jsonl", "json", "csv"]})


@pytest.fixture
def store(spec):
    """A store with completions: two samples of row 1, row 2 not usable."""
    store = make_store(spec)
    changes = [{}, {"num_samples": 2}, {"status": "empty", "error": "no text"}, {}]
    write_prompts(store, [make_prompt(i, **change) for i, change in enumerate(changes)])
    rows = [{**row, "row_id": f"row-{i}", "row_index": i} for i, row in enumerate(ROWS)]
    write_raw(store, rows, SOURCE)
    complete_partition(spec, store, KEY, EchoGenerator, "model")
    return store


def test_every_request_stands_beside_its_row_in_order(spec, store):
    report = join_partition(spec, store, KEY)
    rows = read_rows(store, OUTPUT)
    assert [(r["row_index"], r["sample_index"], r["status"]) for r in rows] == [
        (0, 0, "stop"),
        (1, 0, "stop"),
        (1, 1, "stop"),
        (2, 0, "empty"),
        (3, 0, "stop"),
    ]
    for row in rows:
        source = ROWS[row["row_index"]]
        assert {name: row[name] for name in source} == source
    assert rows[4]["completion"] == "1 2 3 3"
    assert report.rows == 5
    assert report.metadata["input_rows"] == 4


def test_source_columns_come_first(spec, store):
    join_partition(spec, store, KEY)
    names = store.partition(OUTPUT, KEY).schema().names
    assert names[:5] == ["text", "tags", "score", "row_id", "row_index"]
    assert "row_error" not in names


def test_other_formats_hold_the_same_rows(spec, store):
    join_partition(spec, store, KEY)
    rows = read_rows(store, OUTPUT)
    folder = store.partition(OUTPUT, KEY).path
    with open(f"{folder}/output.jsonl", encoding="utf-8") as file:
        assert [json.loads(line) for line in file] == rows
    with open(f"{folder}/output.json", encoding="utf-8") as file:
        assert json.load(file) == rows
    with open(f"{folder}/output.csv", encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["text"] for row in found] == [row["text"] or "" for row in rows]
    assert [json.loads(row["tags"] or "null") for row in found] == [row["tags"] for row in rows]


def test_a_format_no_longer_asked_for_is_removed(tmp_path, spec, store):
    join_partition(spec, store, KEY)
    join_partition(make_spec(tmp_path), store, KEY)
    files = [path.rpartition("/")[2] for path in store.fs.ls(store.partition(OUTPUT, KEY).path)]
    assert not any(name.startswith("output.") for name in files)
    assert len([name for name in files if name.endswith(".parquet")]) == 1


def test_a_partition_of_no_rows_gives_empty_files(tmp_path):
    spec = make_spec(tmp_path, output={"formats": ["jsonl", "json", "csv"]})
    store = make_store(spec)
    write_prompts(store, [])
    complete_partition(spec, store, KEY, EchoGenerator, "model")
    assert join_partition(spec, store, KEY).rows == 0
    folder = store.partition(OUTPUT, KEY).path
    with open(f"{folder}/output.json", encoding="utf-8") as file:
        assert json.load(file) == []


def test_completions_of_another_dataset_are_refused(spec, store):
    rows = [{**row, "row_id": f"other-{i}", "row_index": i} for i, row in enumerate(ROWS)]
    write_raw(store, rows, SOURCE)
    with pytest.raises(ValueError, match="completions was made from another raw_dataset"):
        join_partition(spec, store, KEY)


def test_a_grown_dataset_is_refused_until_it_is_completed(spec, store):
    rows = [{**row, "row_id": f"row-{i}", "row_index": i} for i, row in enumerate(ROWS * 2)]
    write_raw(store, rows, SOURCE)
    with pytest.raises(ValueError, match="completions has rows 0 to 3, raw_dataset has 8"):
        join_partition(spec, store, KEY)


def test_the_preview_is_short(spec, store):
    join_partition(spec, store, KEY)
    rows = preview(store.partition(OUTPUT, KEY), max_characters=10)
    assert len(rows) == 5
    assert rows[1]["text"] == 'quotes " …'


def test_scan_table_reads_all_partitions(spec, store, tmp_path):
    join_partition(spec, store, KEY)
    table = scan_table(spec.output.root, spec.name)
    assert isinstance(table, pl.LazyFrame)
    assert table.collect()["partition"].to_list() == [KEY] * 5
    with pytest.raises(FileNotFoundError, match="no finished partition; materialise other/output"):
        scan_table(spec.output.root, "other")


def test_scan_table_names_what_is_damaged_and_leaves_out_strangers(spec, store):
    join_partition(spec, store, KEY)
    table_folder = f"{store.path}/{OUTPUT}"
    (Path(table_folder) / ".DS_Store").write_text("x")
    (Path(table_folder) / "not a key").mkdir()
    assert scan_table(spec.output.root, spec.name).collect().height == 5
    partition = store.partition(OUTPUT, KEY)
    (part,) = partition.complete_manifest().parts
    partition.delete(part.name)
    with pytest.raises(ValueError, match=r"part-.*parquet is missing; materialise output again"):
        scan_table(spec.output.root, spec.name)


def test_the_report_says_where_the_other_formats_are(spec, store):
    report = join_partition(spec, store, KEY)
    for name in ("jsonl", "json", "csv"):
        assert Path(report.metadata[f"path_{name}"]).is_file()
