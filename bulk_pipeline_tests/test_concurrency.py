"""Readers and writers of one table at the same time."""

import threading
from pathlib import Path

import dagster as dg
import polars as pl
import pyarrow as pa

from bulk_pipeline import build_bulk_inference_defs, scan_table
from bulk_pipeline.storage.schemas import OUTPUT, RAW_DATASET, TABLES
from bulk_pipeline.storage.store import Store

ROWS, KEYS, REWRITES = 300, ("a", "b", "c"), 40
SCHEMA = pa.schema([("row_index", pa.int64()), ("version", pa.int64())])


def rewrite(store: Store, key: str, version: int) -> None:
    """Write a partition in two parts, all of one version."""
    with store.partition(OUTPUT, key).writer() as writer:
        parts = []
        for first in (0, ROWS // 2):
            rows = {
                "row_index": range(first, first + ROWS // 2),
                "version": [version] * (ROWS // 2),
            }
            with writer.new_part(SCHEMA) as part:
                part.write(pa.table({name: list(column) for name, column in rows.items()}, SCHEMA))
            parts.append(part.part)
        writer.commit(parts, complete=True)


def test_a_reader_sees_one_version_of_each_partition(tmp_path: Path) -> None:
    store = Store(str(tmp_path), "data")
    for key in KEYS:
        rewrite(store, key, 0)
    is_done = threading.Event()

    def write() -> None:
        for version in range(1, REWRITES + 1):
            for key in KEYS:
                rewrite(store, key, version)
        is_done.set()

    writer = threading.Thread(target=write)
    writer.start()
    versions = set()
    while not is_done.is_set() or not versions:
        try:
            table = scan_table(str(tmp_path), "data").collect()
        except FileNotFoundError:  # written again between the scan and its collection
            continue
        counts = table.group_by("partition").agg(
            pl.len().alias("rows"),
            pl.col("version").n_unique().alias("versions"),
            pl.col("row_index").n_unique().alias("indices"),
            pl.col("version").first(),
        )
        assert counts.height == len(KEYS)
        assert counts["rows"].to_list() == counts["indices"].to_list() == [ROWS] * len(KEYS)
        assert counts["versions"].to_list() == [1] * len(KEYS)
        versions |= set(counts["version"])
    writer.join()
    last = scan_table(str(tmp_path), "data").collect()
    assert set(last["version"]) == {REWRITES}


def test_a_second_launch_does_not_write_the_same_partition(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    spec = {
        "name": "data",
        "source": {"path": "rows.jsonl"},
        "prompt": {"column": "text"},
        "generator": {"model": "owner/name"},
        "output": {"root": str(tmp_path / "tables")},
    }
    defs = build_bulk_inference_defs(spec, tmp_path)
    store = Store(str(tmp_path / "tables"), "data")
    with (
        store.partition(RAW_DATASET, "all").writer(),
        dg.DagsterInstance.ephemeral() as instance,
    ):
        result = dg.materialize(
            list(defs.assets or []),
            instance=instance,
            resources=defs.resources,
            partition_key="all",
            raise_on_error=False,
        )
        assert not result.success
        failure = result.failure_data_for_node("data__raw_dataset")
        assert failure is not None
        assert failure.user_failure_data is not None
        description = failure.user_failure_data.description or ""
        assert "all: raw_dataset: data/raw_dataset/all is being written by a run on" in description
        for table in TABLES:
            assert not instance.get_materialized_partitions(dg.AssetKey(["data", table]))
