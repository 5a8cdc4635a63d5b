"""Reading finished tables with polars, by their manifests."""

from typing import Any

import polars as pl

from bulk_pipeline.storage.manifest import Manifest
from bulk_pipeline.storage.partition import Partition
from bulk_pipeline.storage.schemas import OUTPUT
from bulk_pipeline.storage.store import Store


def scan_partition(partition: Partition) -> pl.LazyFrame:
    """One finished partition, lazily: as it is committed now.

    Collecting it after the partition was written again is a FileNotFoundError, never a mixture.

    Raises
    ------
    ValueError
        If it is missing or unfinished.
    """
    return _scan_parts(partition, partition.complete_manifest())


def _scan_parts(partition: Partition, manifest: Manifest) -> pl.LazyFrame:
    partition.check_parts(manifest.parts)
    paths = [partition.part_path(part) for part in manifest.parts]
    return pl.concat([_scan(partition.store, path) for path in paths])


def _scan_finished(partition: Partition) -> pl.LazyFrame | None:
    """A partition's rows if it is finished, also where it is rewritten meanwhile."""
    manifest = partition.manifest()
    while manifest is not None and manifest.complete:
        try:
            return _scan_parts(partition, manifest)
        except ValueError:
            newer = partition.manifest()
            if newer == manifest:
                raise
            manifest = newer
    return None


def finished_partitions(store: Store, table: str) -> list[str]:
    """Keys of a table's finished partitions, sorted."""
    manifests = store.manifests(table, store.partition_keys(table))
    return [key for key, manifest in manifests.items() if manifest and manifest.complete]


def scan_table(
    root: str,
    dataset: str,
    table: str = OUTPUT,
    storage_options: dict[str, Any] | None = None,
) -> pl.LazyFrame:
    """All finished partitions of a table, lazily, in the order of their keys.

    Parameters
    ----------
    root
        The dataset's ``output.root``.
    table
        ``raw_dataset``, ``prompts``, ``completions`` or ``output``.

    Returns
    -------
    LazyFrame
        The table's columns and ``partition``; a column that a partition lacks is null there.

    Raises
    ------
    FileNotFoundError
        If no partition of the table is finished.
    ValueError
        If a manifest or a part is damaged or missing; one line that names it.
    """
    store = Store(root, dataset, storage_options)
    frames = []
    for key in store.partition_keys(table):
        rows = _scan_finished(store.partition(table, key))
        if rows is not None:
            frames.append(rows.with_columns(pl.lit(key).alias("partition")))
    if not frames:
        raise FileNotFoundError(
            f"{store.path}/{table} has no finished partition; materialise {dataset}/{table} first"
        )
    return pl.concat(frames, how="diagonal_relaxed")


def _scan(store: Store, path: str) -> pl.LazyFrame:
    if store.is_local:
        return pl.scan_parquet(path)
    import pyarrow.dataset as ds

    # Not by polars' own reader, which would want the storage options under other names.
    return pl.scan_pyarrow_dataset(
        ds.dataset([store.fs._strip_protocol(path)], filesystem=store.fs)
    )
