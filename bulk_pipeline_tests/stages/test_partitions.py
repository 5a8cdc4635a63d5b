"""Keys of partitions: what they are made of, and that they stay."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulk_pipeline.stages import sources
from bulk_pipeline.stages.ingest import ingest_partition
from bulk_pipeline.stages.partitions import (
    PARTITIONS_FILE,
    Slice,
    assign_keys,
    list_files,
    plan_partitions,
)
from bulk_pipeline.storage.schemas import RAW_DATASET
from bulk_pipeline.storage.store import check_partition_key
from bulk_pipeline_tests.factories import make_spec, make_store, read_rows


def add_files(root: Path, *names: str, rows: int = 1) -> None:
    for name in names:
        path = root / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f'{{"text": "{name} {n}"}}\n' for n in range(rows)))


def plan(root: Path, by: str = "file", path: Any = None, **changes: Any) -> dict[str, Slice]:
    source = {"path": path or f"{root}/in", **changes.pop("source", {})}
    spec = make_spec(root, source=source, partitions={"by": by, **changes})
    return plan_partitions(spec, make_store(spec))


def contents(plan: dict[str, Slice]) -> dict[str, list[str]]:
    return {key: [file.relative for file in slice_.files] for key, slice_ in plan.items()}


def test_file_key_is_its_path_without_endings(tmp_path: Path) -> None:
    add_files(tmp_path, "a.jsonl", "v1.2.csv.gz", "de/Größe 1.json", "x..y.txt", ".hidden.jsonl")
    add_files(tmp_path, "_tmp/b.jsonl", "notes.md")
    assert contents(plan(tmp_path)) == {
        "a": ["a.jsonl"],
        "de_Gr__e_1": ["de/Größe 1.json"],
        "v1.2": ["v1.2.csv.gz"],
        "x.y": ["x..y.txt"],
    }


def test_folder_is_a_partition(tmp_path: Path) -> None:
    add_files(tmp_path, "a/1.jsonl", "a/2.jsonl", "a/b/3.jsonl", "4.jsonl")
    assert contents(plan(tmp_path, "folder")) == {
        "root": ["4.jsonl"],
        "a": ["a/1.jsonl", "a/2.jsonl"],
        "a_b": ["a/b/3.jsonl"],
    }


def test_uncut_dataset_is_one_partition(tmp_path: Path) -> None:
    add_files(tmp_path, "b.jsonl", "a.jsonl")
    assert contents(plan(tmp_path, "none")) == {"all": ["a.jsonl", "b.jsonl"]}


@pytest.mark.parametrize(
    ("path", "relative"),
    [
        ("in", ["a.jsonl", "b.csv", "sub/a.jsonl"]),
        ("in/*.jsonl", ["a.jsonl"]),
        ("in/**/*.jsonl", ["a.jsonl", "sub/a.jsonl"]),
        ("in/s*/a.jsonl", ["sub/a.jsonl"]),
        ("in/a.jsonl", ["a.jsonl"]),
        (["in/b.csv", "in/sub/*"], ["b.csv", "sub/a.jsonl"]),
        (["in/a.jsonl", "in/*.jsonl"], ["a.jsonl"]),
    ],
    ids=str,
)
def test_path_is_file_folder_glob_or_list(tmp_path: Path, path: Any, relative: list[str]) -> None:
    add_files(tmp_path, "a.jsonl", "b.csv", "sub/a.jsonl")
    paths = [f"{tmp_path}/{name}" for name in ([path] if isinstance(path, str) else path)]
    spec = make_spec(tmp_path, source={"path": paths})
    found = list_files(spec.source)  # type: ignore[arg-type]
    assert [file.relative for file in found] == relative
    assert all(os.path.isfile(file.path) for file in found)


def test_folder_with_a_format_takes_every_name(tmp_path: Path) -> None:
    add_files(tmp_path, "a", "b.data", "_SUCCESS")
    assert contents(plan(tmp_path, source={"format": "jsonl"})) == {
        "a": ["a"],
        "b.data": ["b.data"],
    }


def test_name_with_glob_characters_is_a_file_where_there_is_one(tmp_path: Path) -> None:
    add_files(tmp_path, "x[1].jsonl", "x1.jsonl")
    assert contents(plan(tmp_path, path=f"{tmp_path}/in/x[1].jsonl")) == {"x_1_": ["x[1].jsonl"]}


@pytest.mark.parametrize("path", ["none.jsonl", "in/*.csv", "in/sub"])
def test_path_without_files_is_named(tmp_path: Path, path: str) -> None:
    add_files(tmp_path, "a.jsonl")
    (tmp_path / "in/sub").mkdir()
    with pytest.raises(ValueError, match=r"source\.path: no files match '.*'; correct it") as error:
        plan(tmp_path, path=[f"{tmp_path}/in/a.jsonl", f"{tmp_path}/{path}"])
    assert path in str(error.value)
    assert "\n" not in str(error.value)


def test_colliding_names_get_a_hash(tmp_path: Path) -> None:
    add_files(tmp_path, "a.jsonl", "a.csv", "A/b.jsonl", "a_b.jsonl")
    found = contents(plan(tmp_path))
    assert len({key.casefold() for key in found}) == 4
    assert {key.rpartition("-")[0] for key in found} == {"a", "A_b", "a_b"}


def test_key_stays_when_files_come_and_go(tmp_path: Path) -> None:
    add_files(tmp_path, "b.jsonl")
    first = plan(tmp_path)
    add_files(tmp_path, "B.csv", "a.jsonl")
    second = plan(tmp_path)
    assert second["b"] == first["b"]
    assert len(second) == 3

    (tmp_path / "in/b.jsonl").unlink()
    add_files(tmp_path, "b.json")
    third = contents(plan(tmp_path))
    assert "b" not in third
    assert ["b.json"] in third.values()

    add_files(tmp_path, "b.jsonl")
    assert contents(plan(tmp_path))["b"] == ["b.jsonl"]


def test_mapping_is_written_only_when_something_is_new(tmp_path: Path) -> None:
    add_files(tmp_path, "a.jsonl")
    plan(tmp_path)
    stored = tmp_path / "tables/data" / PARTITIONS_FILE
    inode = stored.stat().st_ino
    keep_open = stored.open()  # the inode is not given to another file
    plan(tmp_path)
    assert stored.stat().st_ino == inode
    add_files(tmp_path, "b.jsonl")
    plan(tmp_path)
    assert stored.stat().st_ino != inode
    assert json.loads(stored.read_text())["file"] == {"a.jsonl": "a", "b.jsonl": "b"}
    keep_open.close()


stems = st.text(max_size=200) | st.text("aA._-/ é", max_size=6)


@given(st.lists(st.dictionaries(stems, stems, max_size=6), max_size=4))
def test_keys_are_valid_unique_and_stay(additions: list[dict[str, str]]) -> None:
    assigned: dict[str, str] = {}
    for stems_ in additions:
        before = dict(assigned)
        assigned.update(assign_keys(stems_, assigned))
        assert before.items() <= assigned.items()
        assert set(stems_) <= set(assigned)
        assert len({key.casefold() for key in assigned.values()}) == len(assigned)
        for key in assigned.values():
            check_partition_key(key)


# --- by rows -----------------------------------------------------------------------------------


def test_rows_are_cut_across_files(tmp_path: Path) -> None:
    add_files(tmp_path, "a.jsonl", rows=5)
    add_files(tmp_path, "b.jsonl", rows=4)
    found = plan(tmp_path, "rows", rows=3)
    assert list(found) == [
        "rows-000000000000-000000000002",
        "rows-000000000003-000000000005",
        "rows-000000000006-000000000008",
    ]
    spec = make_spec(
        tmp_path, source={"path": f"{tmp_path}/in"}, partitions={"by": "rows", "rows": 3}
    )
    store = make_store(spec)
    texts = []
    for key in found:
        ingest_partition(spec, store, key)
        rows = read_rows(store, RAW_DATASET, key)
        assert [row["row_index"] for row in rows] == [0, 1, 2]
        texts += [row["text"] for row in rows]
    assert texts == [f"a.jsonl {n}" for n in range(5)] + [f"b.jsonl {n}" for n in range(4)]


def test_row_keys_stay_when_the_file_grows(tmp_path: Path) -> None:
    add_files(tmp_path, "a.jsonl", rows=4)
    before = list(plan(tmp_path, "rows", rows=3))
    add_files(tmp_path, "a.jsonl", rows=7)
    after = list(plan(tmp_path, "rows", rows=3))
    assert after[: len(before)] == before
    assert len(after) == 3


def test_rows_are_counted_again_only_where_a_file_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = []
    count = sources.FilesReader.num_rows
    monkeypatch.setattr(
        sources.FilesReader,
        "num_rows",
        lambda self, file: (counted.append(file.relative), count(self, file))[1],
    )
    add_files(tmp_path, "a.jsonl", "b.jsonl", rows=2)
    plan(tmp_path, "rows", rows=3)
    plan(tmp_path, "rows", rows=3)
    assert counted == ["a.jsonl", "b.jsonl"]
    add_files(tmp_path, "b.jsonl", rows=3)
    plan(tmp_path, "rows", rows=3)
    assert counted == ["a.jsonl", "b.jsonl", "b.jsonl"]


def test_no_rows_are_one_empty_partition(tmp_path: Path) -> None:
    add_files(tmp_path, "a.jsonl", rows=0)
    (key,) = plan(tmp_path, "rows", rows=3)
    spec = make_spec(
        tmp_path, source={"path": f"{tmp_path}/in"}, partitions={"by": "rows", "rows": 3}
    )
    assert ingest_partition(spec, make_store(spec), key).rows == 0


@pytest.mark.parametrize("streaming", [False, True])
def test_dataset_is_cut_by_rows(tmp_path: Path, streaming: bool) -> None:
    dataset = datasets.Dataset.from_dict({"text": [f"t{n}" for n in range(5)]})
    datasets.DatasetDict({"train": dataset}).save_to_disk(tmp_path / "set")
    source = {"type": "huggingface", "dataset": f"{tmp_path}/set", "streaming": streaming}
    spec = make_spec(tmp_path, source=source, partitions={"by": "rows", "rows": 3})
    store = make_store(spec)
    keys = list(plan_partitions(spec, store))
    assert keys == ["rows-000000000000-000000000002", "rows-000000000003-000000000005"]
    ingest_partition(spec, store, keys[1])
    assert [row["text"] for row in read_rows(store, RAW_DATASET, keys[1])] == ["t3", "t4"]
    assert store.partition(RAW_DATASET, keys[1]).manifest().inputs["split"] == "train"  # type: ignore[union-attr]


def test_streamed_dataset_of_unknown_length_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streamed = datasets.IterableDataset.from_generator(lambda: iter([{"text": "a"}]))
    monkeypatch.setattr(sources, "load_dataset", lambda source: (streamed, None))
    spec = make_spec(
        tmp_path,
        source={"type": "huggingface", "dataset": "owner/set", "streaming": True},
        partitions={"by": "rows"},
    )
    with pytest.raises(ValueError, match=r"partitions\.by: rows .* set source\.streaming to false"):
        plan_partitions(spec, make_store(spec))


# --- elsewhere ---------------------------------------------------------------------------------


def test_source_and_tables_by_url() -> None:
    fs = fsspec.filesystem("memory")
    fs.pipe({"/bucket/in/a.jsonl": b'{"text": "a"}\n', "/bucket/in/b.jsonl": b'{"text": "b"}\n'})
    spec = make_spec(
        "memory://bucket", source={"path": "memory://bucket/in/*.jsonl"}, partitions={"by": "file"}
    )
    store = make_store(spec)
    assert list(plan_partitions(spec, store)) == ["a", "b"]
    report = ingest_partition(spec, store, "b")
    assert report.rows == 1
    assert [row["text"] for row in read_rows(store, RAW_DATASET, "b")] == ["b"]


def test_planning_imports_no_model_library(tmp_path: Path) -> None:
    add_files(tmp_path, "a.jsonl")
    code = f"""
import sys
from pathlib import Path
from bulk_pipeline.spec import load_spec
from bulk_pipeline.stages.partitions import plan_partitions
from bulk_pipeline.storage.store import Store
spec = load_spec({{"name": "d", "source": {{"path": {f"{tmp_path}/in"!r}}},
    "prompt": {{"column": "text"}}, "generator": {{"model": "m"}}}})
assert list(plan_partitions(spec, Store({str(tmp_path)!r}, "d"))) == ["all"]
print([name for name in ("torch", "transformers", "datasets") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
