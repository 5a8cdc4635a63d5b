"""The source's rows in, the partition's raw_dataset table out: the same values, and an identity.

The source is read once, in batches, which wait in a temporary file until all rows are seen: only
then are the columns' types and the numbers of equal rows known. Memory stays bounded.
"""

import hashlib
import marshal
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import IO, Any

import jinja2
import jinja2.meta
import numpy as np
import pyarrow as pa

from bulk_pipeline.spec import BulkInferenceSpec, FilesSource
from bulk_pipeline.stages.columns import (
    ValueShape,
    column_from_values,
    merge_types,
    to_canonical_json,
)
from bulk_pipeline.stages.formats.batch import Batch
from bulk_pipeline.stages.partitions import Slice, plan_partitions
from bulk_pipeline.stages.sources import FilesReader, HuggingFaceReader
from bulk_pipeline.stages.stage_report import StageReport
from bulk_pipeline.storage.part_writer import PartWriter
from bulk_pipeline.storage.partition_writer import PartitionWriter
from bulk_pipeline.storage.schemas import OUR_COLUMNS, RAW_DATASET, ROW_ERROR_FIELD, ROW_FIELDS
from bulk_pipeline.storage.store import Store
from bulk_pipeline.wording import counted

HASH_BYTES = 16
BUCKET_ROWS = 1_000_000  # rows whose hashes are sorted at once
MAX_SHOWN = 10  # duplicated values in an error
MAX_SHOWN_COLUMNS = 30


def ingest_partition(spec: BulkInferenceSpec, store: Store, key: str) -> StageReport:
    """Write the raw_dataset table of one partition.

    Parameters
    ----------
    spec
        The dataset; its paths are resolved.
    store
        Where the table goes.
    key
        The partition, one of `plan_partitions`.

    Raises
    ------
    ValueError
        If the partition is not in the source, a file cannot be read, a column that the
        configuration names is missing, or ids are missing or not unique.
    """
    reader = _open_source(spec, _find_slice(spec, store, key))
    partition = store.partition(RAW_DATASET, key)
    with ExitStack() as stack:
        writer = stack.enter_context(partition.writer())
        # Beside the table, where there is room for it; without a name, so it cannot be left over.
        folder = partition.path if store.is_local else None
        files = [stack.enter_context(tempfile.TemporaryFile(dir=folder)) for _ in range(3)]
        rows = SpooledRows(files[0])
        ids = RowIds(spec, key, *files[1:])
        for batch in reader.batches():
            rows.append(batch)
            ids.append(batch, rows.columns)
        _check_columns(spec, rows)
        ids.finish(rows)
        inputs = reader.inputs | {"settings": source_settings(spec)}
        return _write(writer, rows, ids, inputs)


def source_settings(spec: BulkInferenceSpec) -> dict[str, Any]:
    """What decides the table besides the source itself; if it changes, the table is stale."""
    names = {"format", "limit", "config", "split", "dataset", "id_column"}
    settings = spec.source.model_dump(mode="json", include=names)
    columns = None if spec.source.id_column else id_columns(spec)
    return settings | {"id_columns": columns}


def _find_slice(spec: BulkInferenceSpec, store: Store, key: str) -> Slice:
    plan = plan_partitions(spec, store)
    if key not in plan:
        raise ValueError(
            f"partition {key!r} is not in the source of {spec.name}, which has "
            f"{counted(len(plan), 'partition')} ({_listed(plan)}); put its files back or choose "
            "another"
        )
    return plan[key]


def _open_source(spec: BulkInferenceSpec, slice_: Slice) -> FilesReader | HuggingFaceReader:
    if isinstance(spec.source, FilesSource):
        return FilesReader(spec.source, slice_.files)
    return HuggingFaceReader(spec.source, slice_.start, slice_.stop)


def _listed(names: Iterable[str], most: int = MAX_SHOWN_COLUMNS) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def id_columns(spec: BulkInferenceSpec) -> list[str]:
    """Columns that a row's id is made of where there is no `source.id_column`.

    Raises
    ------
    ValueError
        If `prompt.template` is not a template.
    """
    if spec.source.id_columns is not None:
        return spec.source.id_columns
    prompt = spec.prompt
    names = [prompt.column, prompt.messages_column, prompt.turns_column, prompt.system_column]
    if prompt.template:
        names += sorted(_template_variables(prompt.template))
    names += sorted(spec.sampling.from_columns.values())
    return list(dict.fromkeys(name for name in names if name))


def _template_variables(template: str) -> set[str]:
    try:
        tree = jinja2.Environment().parse(template)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"prompt.template: line {error.lineno} is not valid Jinja ({error.message}); correct it"
        ) from None
    return jinja2.meta.find_undeclared_variables(tree)


def _check_columns(spec: BulkInferenceSpec, rows: "SpooledRows") -> None:
    named: dict[str, list[Any]] = {
        "prompt.column": [spec.prompt.column],
        "prompt.messages_column": [spec.prompt.messages_column],
        "prompt.turns_column": [spec.prompt.turns_column],
        "prompt.system_column": [spec.prompt.system_column],
        "source.id_column": [spec.source.id_column],
        "source.id_columns": spec.source.id_columns or [],
        **{
            f"sampling.from_columns.{setting}": [name]
            for setting, name in spec.sampling.from_columns.items()
        },
    }
    for field, names in named.items():
        for name in names:
            if name is not None and name not in rows.columns and rows.num_rows:
                raise _no_column(field, name, rows.columns)


def _no_column(field: str, name: str, columns: Iterable[str]) -> ValueError:
    return ValueError(
        f"{field}: the source has no column {name!r}, it has {_listed(columns)}; correct the name"
    )


class SpooledRows:
    """All rows of the partition, in a temporary file, and what is known of their columns."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self.columns: dict[str, tuple[ValueShape, pa.DataType | None]] = {}
        self.num_rows = 0
        self.num_errors = 0

    def append(self, batch: Batch) -> None:
        """Add rows, and take note of the types in them."""
        if isinstance(batch.rows, list):
            for row in batch.rows:
                for name, value in row.items():
                    self._column(name)[0].add(value)
            stored: Any = batch.rows
        else:
            for name, type_ in zip(batch.rows.schema.names, batch.rows.schema.types, strict=True):
                shape, merged = self._column(name)
                self.columns[name] = shape, merge_types(merged, type_)
            stored = _to_ipc(batch.rows)
        # marshal is exact for what JSON holds; only this process reads the file.
        data = marshal.dumps((stored, batch.errors))
        self._file.write(len(data).to_bytes(8) + data)
        self.num_rows += len(batch)
        self.num_errors += len(batch.errors)

    def _column(self, name: str) -> tuple[ValueShape, pa.DataType | None]:
        if (column := self.columns.get(name)) is None:
            column = self.columns[name] = ValueShape(), pa.null()
        return column

    def types(self) -> dict[str, pa.DataType | None]:
        """Each column's type in the order they came; None for JSON text."""
        return {
            name: merge_types(shape.arrow_type(), type_)
            for name, (shape, type_) in self.columns.items()
        }

    def __iter__(self) -> Iterator[Batch]:
        self._file.seek(0)
        num_rows = 0
        while num_rows < self.num_rows:
            size = int.from_bytes(self._file.read(8))
            stored, errors = marshal.loads(self._file.read(size))
            batch = Batch(stored if isinstance(stored, list) else _from_ipc(stored), errors)
            num_rows += len(batch)
            yield batch


def _to_ipc(rows: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_batch(rows)
    return sink.getvalue().to_pybytes()


def _from_ipc(data: bytes) -> pa.RecordBatch:
    with pa.ipc.open_stream(data) as stream:
        return stream.read_next_batch()


def _values(batch: Batch, name: str) -> list[Any]:
    """One column of a batch as Python values; all None where it has no such column."""
    if isinstance(batch.rows, list):
        return [row.get(name) for row in batch.rows]
    if name not in batch.rows.schema.names:
        return [None] * len(batch)
    return batch.rows.column(name).to_pylist()


class RowIds:
    """Makes the rows' ids: the value of `source.id_column`, else a hash and a number.

    The number tells equal rows apart. It and duplicates are found by the rows' hashes, which are
    kept in a temporary file.
    """

    def __init__(
        self, spec: BulkInferenceSpec, key: str, hashes: IO[bytes], occurrences: IO[bytes]
    ):
        self.column = spec.source.id_column
        self.columns = [self.column] if self.column else id_columns(spec)
        self._key = key
        self._hash_file, self._occurrence_file = hashes, occurrences
        self._num_rows = 0
        self._hashes = np.empty((0, 2), np.uint64)
        self._occurrences = np.empty(0, np.int64)

    def append(self, batch: Batch, columns: Iterable[str]) -> None:
        """Take note of a batch's ids; `columns` are those of the rows so far."""
        texts: Iterable[bytes]
        if self.column:
            texts = (text.encode() for text in self._own_ids(batch, self._num_rows, columns))
        else:
            values = [_values(batch, name) for name in self.columns]
            rows = zip(*values, strict=True) if values else [()] * len(batch)
            texts = (to_canonical_json(dict(zip(self.columns, row, strict=True))) for row in rows)
        self._hash_file.write(
            b"".join(hashlib.blake2b(text, digest_size=HASH_BYTES).digest() for text in texts)
        )
        self._num_rows += len(batch)

    def _own_ids(self, batch: Batch, first: int, columns: Iterable[str] = ()) -> list[str]:
        """The values of `source.id_column`, each checked to be one."""
        assert self.column
        values = _values(batch, self.column)
        for place, value in enumerate(values):
            if value is None or value == "":
                if columns and self.column not in columns:
                    raise _no_column("source.id_column", self.column, columns)
                raise self._bad_id(first + place, "has no value", "fill it")
            if isinstance(value, list | dict):
                raise self._bad_id(first + place, "is not text or a number", "use another")
        return [str(value) for value in values]

    def _bad_id(self, index: int, problem: str, remedy: str) -> ValueError:
        return ValueError(
            f"source.id_column: column {self.column!r} {problem} in row {index} (from 0) of "
            f"partition {self._key}; {remedy} or remove source.id_column"
        )

    def finish(self, rows: SpooledRows) -> None:
        """Number equal rows.

        Raises
        ------
        ValueError
            If values of `source.id_column` are not unique.
        """
        if not self._num_rows:
            return
        self._hash_file.flush()
        self._occurrence_file.truncate(8 * self._num_rows)
        self._hashes = np.memmap(self._hash_file, np.uint64, "r", shape=(self._num_rows, 2))
        self._occurrences = np.memmap(
            self._occurrence_file, np.int64, "r+", shape=(self._num_rows,)
        )
        number_occurrences(self._hashes, self._occurrences)
        if self.column and (second := np.flatnonzero(self._occurrences == 1)).size:
            values = self._values_at(rows, second[:MAX_SHOWN].tolist())
            raise ValueError(
                f"source.id_column: column {self.column!r} must be unique in a partition, "
                f"{second.size} values of partition {self._key} are not "
                f"({_listed(map(repr, values))}{', ...' if second.size > MAX_SHOWN else ''}); "
                "make them unique or remove source.id_column"
            )

    def _values_at(self, rows: SpooledRows, indices: list[int]) -> list[str]:
        values, first = [], 0
        for batch in rows:
            places = [index - first for index in indices if first <= index < first + len(batch)]
            if places:
                own = self._own_ids(batch, first)
                values += [own[place] for place in places]
            first += len(batch)
        return values

    def of(self, batch: Batch, first: int) -> list[str]:
        """Return the ids of a batch whose first row has the index `first`."""
        if self.column:
            return self._own_ids(batch, first)
        hashes = self._hashes[first : first + len(batch)].tobytes().hex()
        numbers = self._occurrences[first : first + len(batch)].tolist()
        digits = 2 * HASH_BYTES
        return [
            hashes[place * digits : (place + 1) * digits] + (f"-{number}" if number else "")
            for place, number in enumerate(numbers)
        ]


def number_occurrences(
    hashes: np.ndarray, occurrences: np.ndarray, bucket_rows: int = BUCKET_ROWS
) -> None:
    """Number equal hashes from 0 in their order, about `bucket_rows` of them at a time.

    Parameters
    ----------
    hashes
        Unsigned 64-bit integers, [rows, 2].
    occurrences
        Filled in: how many earlier rows are equal, [rows].
    """
    num_buckets = -(-len(hashes) // bucket_rows)
    for bucket in range(num_buckets):
        indices = np.concatenate(
            [
                np.flatnonzero(hashes[start : start + bucket_rows, 0] % num_buckets == bucket)
                + start
                for start in range(0, len(hashes), bucket_rows)
            ]
        )
        keys = hashes[indices]
        order = np.lexsort((keys[:, 1], keys[:, 0]))  # stable: equal rows stay in their order
        keys = keys[order]
        is_first = np.ones(len(keys), bool)
        is_first[1:] = (keys[1:] != keys[:-1]).any(axis=1)
        places = np.arange(len(keys))
        occurrences[indices[order]] = places - np.maximum.accumulate(np.where(is_first, places, 0))


class _DoesNotFitError(Exception):
    """A value that the column's type cannot hold without loss."""

    def __init__(self, column: str):
        self.column = column


def _write(
    writer: PartitionWriter, rows: SpooledRows, ids: RowIds, inputs: dict[str, Any]
) -> StageReport:
    types = rows.types()
    names = stored_names(types)
    while True:
        try:
            with writer.new_part(_schema(types, names)) as part_writer:
                _write_rows(part_writer, rows, ids, types, names)
            break
        except _DoesNotFitError as error:
            types[error.column] = None
    renamed = {name: stored for name, stored in names.items() if name != stored}
    meta = {
        "json_text_columns": [names[name] for name, type_ in types.items() if type_ is None],
        "renamed_columns": renamed,
        "row_errors": rows.num_errors,
        "id_columns": ids.columns,
    }
    writer.commit([part_writer.part], complete=True, inputs=inputs, meta=meta)
    partition = writer.partition
    return StageReport(
        partition=partition.key,
        rows=rows.num_rows,
        path=partition.path,
        metadata={**meta, "set_aside": writer.set_aside},
    )


def stored_names(columns: Iterable[str]) -> dict[str, str]:
    """Name each source column as the table does: ``source_<name>`` where the name is ours."""
    columns = list(columns)
    taken = OUR_COLUMNS | set(columns)
    names = {}
    for name in columns:
        stored = name
        while name in OUR_COLUMNS and stored in taken:
            stored = f"source_{stored}"
        names[name] = stored
        taken |= {stored}
    return names


def _schema(types: dict[str, pa.DataType | None], names: dict[str, str]) -> pa.Schema:
    fields = [pa.field(names[name], type_ or pa.string()) for name, type_ in types.items()]
    return pa.schema([*fields, *ROW_FIELDS, ROW_ERROR_FIELD])


def _write_rows(
    part_writer: PartWriter,
    rows: SpooledRows,
    ids: RowIds,
    types: dict[str, pa.DataType | None],
    names: dict[str, str],
) -> None:
    schema, first = _schema(types, names), 0
    for batch in rows:
        arrays = [_column(batch, name, type_) for name, type_ in types.items()]
        arrays += [
            pa.array(ids.of(batch, first), pa.string()),
            pa.array(np.arange(first, first + len(batch))),
            pa.array([batch.errors.get(place) for place in range(len(batch))], pa.string()),
        ]
        part_writer.write(pa.RecordBatch.from_arrays(arrays, schema=schema))
        first += len(batch)


def _column(batch: Batch, name: str, type_: pa.DataType | None) -> pa.Array:
    try:
        if isinstance(batch.rows, list) or type_ is None:
            return column_from_values(_values(batch, name), type_)
        if name not in batch.rows.schema.names:
            return pa.nulls(len(batch), type_)
        column = batch.rows.column(name)
        if column.type != type_:
            column = column.cast(type_)
            column.validate(full=True)  # Arrow's cast breaks lists of nulls
        return column
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        if type_ is None:
            raise
        raise _DoesNotFitError(name) from error
