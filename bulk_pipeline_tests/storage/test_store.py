"""The commit protocol: readers see what was committed, whole, and one writer writes."""

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulk_pipeline.storage import part_writer as part_writer_module
from bulk_pipeline.storage.manifest import SCHEMA_VERSION, Part
from bulk_pipeline.storage.partition import Partition
from bulk_pipeline.storage.schemas import (
    COMPLETIONS,
    COMPLETIONS_SCHEMA,
    OUR_COLUMNS,
    RAW_DATASET,
    TABLES,
)
from bulk_pipeline.storage.store import Store, check_partition_key

SCHEMA = pa.schema([("row_index", pa.int64()), ("text", pa.string())])
SORTED_SCHEMA = pa.schema(
    [("row_index", pa.int64()), ("sample_index", pa.int32()), ("turn", pa.int32())]
)


@pytest.fixture(params=["local", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A store on each kind of file system: with a lock, and without."""
    if request.param == "local":
        return Store(str(tmp_path), "data")
    if request.param == "memory":
        return Store(f"memory://store-{uuid.uuid4().hex}", "data")
    return Store(f"{request.getfixturevalue('s3').new_bucket()}/tables", "data")


@pytest.fixture
def local(tmp_path: Path) -> Partition:
    return Store(str(tmp_path), "data").partition(RAW_DATASET, "all")


def rows(*indices: int) -> list[dict[str, Any]]:
    return [{"row_index": index, "text": f"text {index}"} for index in indices]


def write_part(writer: Any, *indices: int) -> Part:
    with writer.new_part(SCHEMA) as part_writer:
        part_writer.write(pa.Table.from_pylist(rows(*indices), SCHEMA))
    return part_writer.part


def commit(partition: Partition, *indices: int, complete: bool = True, **kwargs: Any) -> None:
    """Write one part and make it the table."""
    with partition.writer() as writer:
        writer.commit([write_part(writer, *indices)], complete, **kwargs)


def read(partition: Partition) -> list[dict[str, Any]]:
    return [row for batch in partition.read() for row in batch.to_pylist()]


def files(partition: Partition) -> set[str]:
    """What lies in the partition's folder, the lock apart."""
    names = {
        path.rpartition("/")[2] for path in partition.store.fs.ls(partition.path, detail=False)
    }
    return names - {".lock"}


def test_committed_rows_are_read_back(store: Store) -> None:
    partition = store.partition(RAW_DATASET, "all")
    commit(partition, 0, 1, 2, inputs={"a": 1}, meta={"b": 2})
    assert read(partition) == rows(0, 1, 2)
    manifest = partition.complete_manifest()
    assert (manifest.num_rows, manifest.inputs, manifest.meta) == (3, {"a": 1}, {"b": 2})
    assert (manifest.parts[0].first_index, manifest.parts[0].last_index) == (0, 2)
    assert partition.schema().metadata[b"schema_version"] == str(SCHEMA_VERSION).encode()


def test_partition_without_rows_keeps_its_schema(store: Store) -> None:
    partition = store.partition(RAW_DATASET, "all")
    commit(partition)
    assert read(partition) == []
    assert partition.schema().equals(SCHEMA)


def test_part_counts_only_when_committed(store: Store) -> None:
    partition = store.partition(RAW_DATASET, "all")
    commit(partition, 0)
    with partition.writer() as writer:
        part = write_part(writer, 1)
        assert read(partition) == rows(0)
        writer.commit([*writer.manifest.parts, part], complete=False)
    with pytest.raises(ValueError, match="partition all of raw_dataset is unfinished"):
        next(partition.read())
    assert [part.rows for part in partition.manifest().parts] == [1, 1]  # type: ignore[union-attr]


def test_missing_partition_is_named(store: Store) -> None:
    partition = store.partition(COMPLETIONS, "k")
    assert partition.manifest() is None
    with pytest.raises(ValueError, match=r"k of completions is missing; materialise data/compl"):
        partition.complete_manifest()


def test_replaced_parts_are_deleted(store: Store) -> None:
    partition = store.partition(RAW_DATASET, "all")
    commit(partition, 0)
    commit(partition, 1)
    (part,) = partition.complete_manifest().parts
    assert read(partition) == rows(1)
    assert files(partition) == {"manifest.json", part.name}


def test_inputs_and_meta_stay_unless_given(store: Store) -> None:
    partition = store.partition(RAW_DATASET, "all")
    commit(partition, 0, inputs={"a": 1}, meta={"b": 1})
    commit(partition, 0, meta={})
    assert (partition.manifest().inputs, partition.manifest().meta) == ({"a": 1}, {})  # type: ignore[union-attr]


def fail_while_writing(writer: Any) -> None:
    with writer.new_part(SCHEMA) as part_writer:
        part_writer.write(pa.Table.from_pylist(rows(1), SCHEMA))
        raise RuntimeError("stop")


def test_failed_part_leaves_nothing(store: Store) -> None:
    partition = store.partition(RAW_DATASET, "all")
    commit(partition, 0)
    before = files(partition)
    with partition.writer() as writer, pytest.raises(RuntimeError, match="stop"):
        fail_while_writing(writer)
    assert files(partition) == before
    assert read(partition) == rows(0)


def test_failed_write_keeps_the_value_of_before(store: Store) -> None:
    store.write_json("x.json", {"a": 1})

    def fail() -> None:
        with store.open_atomic(f"{store.path}/x.json") as file:
            file.write(b"{")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert store.read_json("x.json") == {"a": 1}
    assert store.read_json("y.json") is None
    assert [path.rpartition("/")[2] for path in store.fs.ls(store.path, detail=False)] == ["x.json"]


def test_reader_never_sees_half_a_manifest(local: Partition, monkeypatch: Any) -> None:
    commit(local, 0)
    replace, seen = os.replace, []

    def look_then_replace(source: str, target: str) -> None:
        seen.append(read(local))
        replace(source, target)
        seen.append(read(local))

    monkeypatch.setattr(os, "replace", look_then_replace)
    commit(local, 1)
    assert seen[-2:] == [rows(0), rows(1)]
    assert all(state in (rows(0), rows(1)) for state in seen)


# --- one writer --------------------------------------------------------------------------------


def test_second_writer_is_refused_by_the_lock(local: Partition) -> None:
    with local.writer() as writer:
        part = write_part(writer, 0)
        message = rf"data/raw_dataset/all is being written by a run on .* \(process {os.getpid()},"
        with pytest.raises(RuntimeError, match=message), local.writer():
            pass
        writer.commit([part], complete=True)
    assert read(local) == rows(0)
    commit(local, 1)
    assert read(local) == rows(1)


def test_writer_that_was_overtaken_cannot_commit() -> None:
    partition = Store(f"memory://store-{uuid.uuid4().hex}", "data").partition(RAW_DATASET, "all")
    with partition.writer() as first:
        part = write_part(first, 0)
        with partition.writer() as second:
            with pytest.raises(RuntimeError, match="is being written by a run on"):
                first.commit([part], complete=True)
            second.commit([write_part(second, 1)], complete=True)
        with pytest.raises(RuntimeError, match="is being written by"):
            first.commit([part], complete=True)
    assert read(partition) == rows(1)


def test_other_partitions_can_be_written_meanwhile(store: Store) -> None:
    with store.partition(RAW_DATASET, "a").writer() as writer:
        commit(store.partition(RAW_DATASET, "b"), 1)
        writer.commit([write_part(writer, 0)], complete=True)
    assert read(store.partition(RAW_DATASET, "b")) == rows(1)


def test_killed_writer_leaves_no_trace(local: Partition) -> None:
    commit(local, 0)
    code = f"""
import os, signal
import pyarrow as pa
from bulk_pipeline.storage.store import Store
partition = Store({local.store.path.rpartition("/")[0]!r}, "data").partition("raw_dataset", "all")
schema = pa.schema([("row_index", pa.int64()), ("text", pa.string())])
with partition.writer() as writer:
    with writer.new_part(schema) as part_writer:
        part_writer.write(pa.Table.from_pylist([{{"row_index": 5, "text": "x"}}], schema))
    with writer.new_part(schema) as part_writer:
        part_writer.write(pa.Table.from_pylist([{{"row_index": 6, "text": "x"}}], schema))
        part_writer.flush()
        os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -signal.SIGKILL
    assert any(name.startswith(".tmp-") for name in files(local))
    assert read(local) == rows(0)  # what was committed before still counts

    with local.writer() as writer:  # the lock died with its holder
        assert not any(name.startswith(".tmp-") for name in files(local))
        (aside,) = writer.set_aside  # whole, but never committed
        writer.commit([write_part(writer, 1)], complete=True)
    assert pq.read_table(aside).to_pylist() == [{"row_index": 5, "text": "x"}]
    assert read(local) == rows(1)


# --- damage ------------------------------------------------------------------------------------


def damage(partition: Partition, how: str) -> str:
    path = partition.part_path(partition.complete_manifest().parts[0])
    if how == "torn":
        data = partition.store.fs.cat_file(path)
        partition.store.fs.pipe_file(path, data[: len(data) // 2])
    else:
        partition.store.fs.rm_file(path)
    return path


@pytest.mark.parametrize("how", ["torn", "missing"])
def test_damaged_part_is_found_and_named(store: Store, how: str) -> None:
    partition = store.partition(RAW_DATASET, "all")
    commit(partition, 0)
    path = damage(partition, how)
    with pytest.raises(
        ValueError, match=rf"part-.* is {how}.*; materialise raw_dataset again"
    ) as e:
        read(partition)
    assert path in str(e.value)


@pytest.mark.parametrize("how", ["torn", "missing"])
def test_damaged_part_is_set_aside_and_its_partition_unfinished(store: Store, how: str) -> None:
    partition = store.partition(RAW_DATASET, "all")
    with partition.writer() as writer:
        parts = [write_part(writer, 0), write_part(writer, 1)]
        writer.commit(parts, complete=True)
    path = damage(partition, how)
    with partition.writer() as writer:
        assert writer.manifest.parts == parts[1:]
        assert not writer.manifest.complete
        names = [found.rpartition("/")[2] for found in writer.set_aside]
        assert names == ([path.rpartition("/")[2]] if how == "torn" else [])
        assert all(store.fs.exists(found) for found in writer.set_aside)
    assert partition.manifest().parts == parts[1:]  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="unfinished"):
        partition.complete_manifest()


def test_foreign_file_is_set_aside_once(store: Store) -> None:
    partition = store.partition(RAW_DATASET, "all")
    commit(partition, 0)
    store.fs.pipe_file(f"{partition.path}/part-foreign.parquet", b"PAR1")
    with partition.writer() as writer:
        assert [path.rpartition("/")[2] for path in writer.set_aside] == ["part-foreign.parquet"]
    with partition.writer() as writer:
        assert writer.set_aside == []
    assert read(partition) == rows(0)
    assert store.set_aside_sizes() == [len(b"PAR1")]


def test_damaged_page_is_found(local: Partition) -> None:
    commit(local, *range(1000))
    path = local.part_path(local.complete_manifest().parts[0])
    data = bytearray(Path(path).read_bytes())
    data[200] ^= 0xFF
    Path(path).write_bytes(data)
    with pytest.raises(ValueError, match=r"part-.* is damaged \(.*checksum.*; move the file away"):
        read(local)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", r"manifest\.json is not a manifest; materialise raw_dataset again"),
        (b'{"table": 1}', r"manifest\.json is not a manifest"),
        (
            b'{"schema_version": 99, "table": "t", "partition": "p"}',
            r"has schema version 99, .* upgrade bulk_pipeline",
        ),
    ],
)
def test_unreadable_manifest_is_named(store: Store, content: bytes, message: str) -> None:
    partition = store.partition(RAW_DATASET, "all")
    store.fs.makedirs(partition.path, exist_ok=True)
    store.fs.pipe_file(f"{partition.path}/manifest.json", content)
    with pytest.raises(ValueError, match=message):
        partition.manifest()


# --- keys and schemas --------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["a", "0", "a.b-c_d", "A" * 150, "rows-000000000000-000000000099"])
def test_partition_key_is_taken(key: str) -> None:
    assert check_partition_key(key) == key


@pytest.mark.parametrize(
    "key", ["", ".", "..", "a..b", "-a", "_a", ".a", "a/b", "a\\b", "a b", "é", "a\n", "A" * 151]
)
def test_partition_key_that_no_path_may_hold_is_refused(store: Store, key: str) -> None:
    with pytest.raises(ValueError, match="partition key must be 1 to 150 letters"):
        store.partition(RAW_DATASET, key)


def test_our_columns_are_those_of_all_tables() -> None:
    assert {"row_id", "row_index", "row_error", "prompt", "completion", "status"} <= OUR_COLUMNS
    assert len(TABLES) == 4


def test_column_of_text_stays_text_where_all_are_null(local: Partition) -> None:
    with local.writer() as writer:
        with writer.new_part(SCHEMA) as part_writer:
            part_writer.write(pa.table({"row_index": [0], "text": pa.nulls(1)}))
        writer.commit([part_writer.part], complete=True)
    assert local.schema().field("text").type == pa.string()


def test_lists_of_nulls_are_written(local: Partition) -> None:
    table = pa.table({"row_index": [0], "x": pa.array([[None, None]])})
    with local.writer() as writer:
        with writer.new_part(table.schema) as part_writer:
            part_writer.write(table)
        writer.commit([part_writer.part], complete=True)
    assert read(local) == table.to_pylist()


def test_long_rows_come_in_small_groups(local: Partition, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_writer_module, "ROW_GROUP_BYTES", 1000)
    with local.writer() as writer:
        with writer.new_part(SCHEMA) as part_writer:
            for index in range(4):
                row = {"row_index": index, "text": "x" * 600}
                part_writer.write(pa.Table.from_pylist([row], SCHEMA))
        writer.commit([part_writer.part], complete=True)
    path = local.part_path(part_writer.part)
    assert pq.ParquetFile(path).metadata.num_row_groups == 2


def test_groups_are_full_whatever_is_written_at_once(
    local: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_writer_module, "ROW_GROUP_ROWS", 10)
    with local.writer() as writer:
        with writer.new_part(SCHEMA) as part_writer:
            for start, stop in ((0, 7), (7, 35), (35, 38)):
                part_writer.write(pa.Table.from_pylist(rows(*range(start, stop)), SCHEMA))
        writer.commit([part_writer.part], complete=True)
    metadata = pq.read_metadata(local.part_path(part_writer.part))
    groups = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    assert groups == [10, 10, 10, 8]
    assert read(local) == rows(*range(38))


def test_json_is_stored_sorted(store: Store) -> None:
    store.write_json("x.json", {"b": 1, "a": [2]})
    assert json.loads(store.fs.cat_file(f"{store.path}/x.json")) == {"b": 1, "a": [2]}
    assert store.fs.cat_file(f"{store.path}/x.json").index(b"a") < 10


# --- read_sorted -------------------------------------------------------------------------------

keys = st.tuples(st.integers(0, 12), st.integers(0, 3), st.integers(0, 1))


@given(st.lists(keys, unique=True, max_size=60), st.data())
@settings(deadline=None, max_examples=80)
def test_sorted_parts_are_merged(
    tmp_path_factory: pytest.TempPathFactory, rows_: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    num_parts = data.draw(st.integers(1, 5))
    owners = data.draw(st.lists(st.integers(0, num_parts - 1), min_size=60, max_size=60))
    folder = tmp_path_factory.mktemp("sorted")
    partition = Store(str(folder), "data").partition(COMPLETIONS, "all")
    with partition.writer() as writer:
        parts = []
        for number in range(num_parts):
            own = sorted(row for row, owner in zip(rows_, owners, strict=False) if owner == number)
            table = pa.Table.from_pylist(
                [dict(zip(SORTED_SCHEMA.names, row, strict=True)) for row in own], SORTED_SCHEMA
            )
            with writer.new_part(SORTED_SCHEMA) as part_writer:
                part_writer.write(table)
            parts.append(part_writer.part)
        batch_size = data.draw(st.integers(1, 7))
        tables = list(partition.read_sorted(parts, batch_size))
    rows = [row for table in tables for row in table.select(SORTED_SCHEMA.names).to_pylist()]
    assert [tuple(row.values()) for row in rows] == sorted(rows_)


def test_columns_that_an_earlier_version_did_not_have_are_null(store: Store) -> None:
    partition = store.partition(COMPLETIONS, "all")
    earlier = pa.schema([column for column in COMPLETIONS_SCHEMA if "logprob" not in column.name])
    row = dict.fromkeys(earlier.names) | {"row_id": "a", "row_index": 0, "completion": "yes"}
    with partition.writer() as writer:
        with writer.new_part(earlier) as part:
            part.write(pa.Table.from_pylist([row], schema=earlier))
        writer.commit([part.part], complete=True)
    (batch,) = partition.read()
    assert batch.schema.equals(COMPLETIONS_SCHEMA)
    assert batch.to_pylist() == [dict.fromkeys(COMPLETIONS_SCHEMA.names) | row]
    (batch,) = partition.read(["completion", "logprobs"])
    assert batch.to_pylist() == [{"completion": "yes", "logprobs": None}]


def test_merge_opens_only_parts_that_overlap(
    local: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    with local.writer() as writer:
        parts = []
        for start in (20, 0, 10):
            table = pa.table(
                {
                    "row_index": pa.array(range(start, start + 10), pa.int64()),
                    "sample_index": pa.array([0] * 10, pa.int32()),
                    "turn": pa.array([0] * 10, pa.int32()),
                }
            )
            with writer.new_part(SORTED_SCHEMA) as part_writer:
                part_writer.write(table)
            parts.append(part_writer.part)
        read_part = Partition.read_part
        monkeypatch.setattr(
            Partition,
            "read_part",
            lambda self, part, **kwargs: (
                opened.append(part.name),
                read_part(self, part, **kwargs),
            )[1],
        )
        merged = local.read_sorted(parts, batch_size=2)
        first = next(merged)
        assert opened == [parts[1].name]
        indices = pa.concat_tables([first, *merged])["row_index"].to_pylist()
        assert indices == list(range(30))
    assert opened == [parts[1].name, parts[2].name, parts[0].name]


def test_merge_of_nothing_is_empty(local: Partition) -> None:
    assert list(local.read_sorted([])) == []
