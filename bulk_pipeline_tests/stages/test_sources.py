"""Files and datasets as they are found: what is read, and what is refused with which words."""

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from bulk_pipeline.spec import FilesSource, HuggingFaceSource
from bulk_pipeline.stages.formats import batch as batches
from bulk_pipeline.stages.formats import json as json_format
from bulk_pipeline.stages.formats import parquet as parquet_format
from bulk_pipeline.stages.sources import FilesReader, HuggingFaceReader, SourceFile


def read(path: Path | str, start: int = 0, stop: int | None = None, **options: Any) -> list[Any]:
    """The rows of one file; errors of rows under the key `!`."""
    reader = FilesReader(
        FilesSource(type="files", path=str(path), **options),
        [SourceFile(str(path), str(path).rpartition("/")[2], start, stop)],
    )
    rows: list[Any] = []
    for batch in reader.batches():
        found = batch.rows if isinstance(batch.rows, list) else batch.rows.to_pylist()
        rows += [
            {**row, "!": batch.errors[place]} if place in batch.errors else row
            for place, row in enumerate(found)
        ]
    return rows


def write(folder: Path, name: str, content: bytes | str) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


ROWS = [{"a": "1", "b": "x"}, {"a": "2", "b": "y"}]
JSONL = '{"a": "1", "b": "x"}\n{"a": "2", "b": "y"}\n'
# Without the time: tests that run side by side must have equal names.
CUT_GZIP = gzip.compress(JSONL.encode() * 999, mtime=0)[:-9]
CSV = "a,b\n1,x\n2,y\n"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.jsonl", JSONL),
        ("x.ndjson", JSONL),
        ("no_newline.jsonl", JSONL.rstrip("\n")),
        ("crlf.jsonl", JSONL.replace("\n", "\r\n")),
        ("bom.jsonl", "\ufeff" + JSONL),
        ("blank.jsonl", JSONL.replace("\n", "\n\n \r\n")),
        ("x.json", json.dumps(ROWS)),
        ("indented.json", "\ufeff\n" + json.dumps(ROWS, indent=2).replace("\n", "\r\n") + "\n"),
        ("x.csv", CSV),
        ("no_newline.csv", CSV.rstrip("\n")),
        ("crlf.csv", CSV.replace("\n", "\r\n")),
        ("bom.csv", "\ufeff" + CSV),
        ("blank.csv", CSV.replace("\n", "\n\n")),
        ("quoted.csv", '"a","b"\n"1","x"\n"2","y"\n'),
        ("x.tsv", CSV.replace(",", "\t")),
        ("UPPER.CSV", CSV),
    ],
)
@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstandard.compress])
def test_same_rows_from_each_way_to_write_them(
    tmp_path: Path, name: str, content: str, compress: Any
) -> None:
    ending = {gzip.compress: ".gz", zstandard.compress: ".zst"}.get(compress, "")
    assert read(write(tmp_path, name + ending, compress(content.encode()))) == ROWS


def test_parquet_keeps_its_types(tmp_path: Path) -> None:
    table = pa.table(
        {
            "n": pa.array([1, None], pa.int16()),
            "category": pa.array(["x", "y"]).dictionary_encode(),
            "nested": [{"a": [1]}, None],
        }
    )
    pq.write_table(table, tmp_path / "x.parquet")
    assert read(tmp_path / "x.parquet") == table.to_pylist()


def test_text_is_a_row_a_line(tmp_path: Path) -> None:
    path = write(tmp_path, "x.txt", "one\r\n\n\u2028 two\nthree")
    assert [row["text"] for row in read(path)] == ["one", "", "\u2028 two", "three"]


def test_csv_values_stay_text(tmp_path: Path) -> None:
    path = write(tmp_path, "x.csv", 'a,b\n007,"two\r\nlines, ""quoted"""\n,NaN\n')
    assert read(path) == [{"a": "007", "b": 'two\r\nlines, "quoted"'}, {"a": "", "b": "NaN"}]


def test_csv_field_may_be_long(tmp_path: Path) -> None:
    path = write(tmp_path, "x.csv", f"a\n{'x' * 200_000}\n")
    assert len(read(path)[0]["a"]) == 200_000


@pytest.mark.parametrize("name", ["x.csv", "x.parquet"])
def test_columns_of_a_file_without_rows_are_known(tmp_path: Path, name: str) -> None:
    if name == "x.csv":
        write(tmp_path, name, "a,b\n")
    else:
        pq.write_table(pa.table({"a": pa.array([], pa.string()), "b": []}), tmp_path / name)
    source = FilesSource(type="files", path=str(tmp_path))
    (batch,) = FilesReader(source, [SourceFile(f"{tmp_path}/{name}", name)]).batches()
    assert isinstance(batch.rows, pa.RecordBatch)
    assert (batch.rows.schema.names, len(batch)) == (["a", "b"], 0)


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv", "x.txt"])
def test_empty_file_has_no_rows(tmp_path: Path, name: str) -> None:
    assert read(write(tmp_path, name, "")) == []


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ('{"v": 123456789012345678901234567890}', 123456789012345678901234567890),
        ('{"v": -9223372036854775809}', -9223372036854775809),
        ('{"v": 18446744073709551616}', 18446744073709551616),
        ('{"v": 1, "v": 2}', 2),
        ('{"v": "\\ud83d\\ude00"}', "\U0001f600"),
        ('{"v": "\\u0000"}', "\0"),
        ('{"v": Infinity}', float("inf")),
        ('{"v": 0.1234567890123456789012}', 0.1234567890123456789012),
    ],
)
@pytest.mark.parametrize("ending", ["jsonl", "json"])
def test_odd_json_values_are_kept(tmp_path: Path, ending: str, line: str, value: Any) -> None:
    path = write(tmp_path, f"x.{ending}", f"[{line}]" if ending == "json" else line)
    assert read(path) == [{"v": value}]


@pytest.mark.parametrize("ending", ["jsonl", "json"])
def test_text_that_utf8_cannot_hold_is_shown_as_escapes(tmp_path: Path, ending: str) -> None:
    line = b'{"ok": "\xc3\xa9", "v": [{"k\\uD800": "a\xff\\udc00"}]}'
    path = write(tmp_path, f"x.{ending}", b"[" + line + b"]" if ending == "json" else line)
    (row,) = read(path)
    assert row["v"] == [{"k\\ud800": "a\\xff\\udc00"}]
    assert row["ok"] == "é"
    assert "column 'v' holds bytes that are not UTF-8" in row["!"]
    assert "column 'v' holds half a character" in row["!"]
    assert "'ok'" not in row["!"]


@pytest.mark.parametrize(
    ("name", "content"), [("x.csv", b"a,v\n1,b\xff\n2,c\n"), ("x.txt", b"b\xff\nc")]
)
def test_text_files_show_bytes_that_are_not_utf8(tmp_path: Path, name: str, content: bytes) -> None:
    bad, good = read(write(tmp_path, name, content))
    column = "v" if name == "x.csv" else "text"
    assert (bad[column], good[column]) == ("b\\xff", "c")
    assert f"column {column!r} holds bytes" in bad["!"]
    assert "!" not in good


def test_parquet_text_that_is_not_utf8_is_shown(tmp_path: Path) -> None:
    bad = pa.array([b"b\xff", b"c", None], pa.binary()).cast(pa.string(), safe=False)
    pq.write_table(pa.table({"v": bad}), tmp_path / "x.parquet")
    first, second, third = read(tmp_path / "x.parquet")
    assert (first["v"], second, third) == ("b\\xff", {"v": "c"}, {"v": None})
    assert "column 'v' holds bytes" in first["!"]


DEEP = "[" * 300 + "]" * 300


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", JSONL + '{"a": "3', r"x\.jsonl line 3: not valid JSON \(.*\); repair"),
        ("x.jsonl", '{"a": "torn\n{"a": 1}\n', r"\(Unterminated string starting at char"),
        ("x.jsonl", '\n{"a": 1} {"a": 2}\n', r"x\.jsonl line 2: not valid JSON \(Extra data"),
        ("x.jsonl", '"text"\n', r"x\.jsonl line 1: must be a JSON object, got a string"),
        ("x.jsonl", "{}\n\n7\n", r"x\.jsonl line 3: must be a JSON object, got a number"),
        ("x.jsonl", "[{}]\n", r"x\.jsonl line 1: must be a JSON object, got a list"),
        ("x.jsonl", "null", r"x\.jsonl line 1: must be a JSON object, got a null"),
        ("x.jsonl", f'{{"a": {DEEP}}}', r"x\.jsonl line 1: nested deeper than 200"),
        ("x.jsonl", f'{{"a": {DEEP * 9}', r"x\.jsonl line 1: not valid JSON"),
        ("x.jsonl", f'{{"a": {"[" * 5000}', r"x\.jsonl line 1: n"),
        ("x.jsonl", JSONL.encode("utf-16"), r"x\.jsonl: must be UTF-8, is UTF-16; save it as"),
        ("x.json", '{"a": 1}', r"x\.json: must hold a list of objects, .* source\.format to jsonl"),
        ("x.json", '[{"a": 1}, {"a"', r"x\.json object 2: not valid JSON"),
        ("x.json", '[{"a": 1}', r"x\.json object 1: expected ',' or '\]'"),
        ("x.json", '[{"a": 1} {"a": 2}]', r"x\.json object 1: expected ',' or '\]'"),
        ("x.json", '[{"a": 1},]', r"x\.json object 2: not valid JSON"),
        ("x.json", '[{"a": 1}, 5]', r"x\.json object 2: must be a JSON object, got a number"),
        ("x.json", "[{}] x", r"x\.json: text follows the list"),
        ("x.json", f'[{{"a": {DEEP}}}]', r"x\.json object 1: nested deeper than 200"),
        ("x.csv", CSV + "3\n", r"x\.csv line 4: must have 2 fields like the header, has 1"),
        ("x.csv", 'a,b\n"1\n2",x\n3,4,5\n', r"x\.csv line 4: must have 2 fields .* has 3"),
        ("x.csv", 'a,b\n1,"x\n', r"x\.csv line 2: not valid CSV"),
        ("x.csv", 'a,b\n"1"2,x\n', r"x\.csv line 2: not valid CSV"),
        ("x.csv", "a,a\n1,2\n", r"x\.csv line 1: column 'a' appears twice"),
        ("x.parquet", "PAR1 no", r"x\.parquet: not a readable Parquet file"),
        ("x.jsonl.gz", CUT_GZIP, r"x\.jsonl\.gz: not a whole gzip"),
        ("x.txt.zst", zstandard.compress(b"a\n" * 9999)[:-3], r"x\.txt\.zst: not a whole zstd"),
        ("x.csv.gz", CSV, r"x\.csv\.gz: not a whole gzip file"),
        ("x.dat", "", r"source\.format: cannot be told from the name .*set source\.format"),
    ],
    ids=lambda value: str(value)[:24],
)  # fmt: skip
def test_unreadable_file_is_named_with_its_line(
    tmp_path: Path, name: str, content: bytes | str, message: str
) -> None:
    path = write(tmp_path, name, content)
    with pytest.raises(ValueError, match=message) as error:
        read(path)
    assert "\n" not in str(error.value)


def test_format_that_is_set_wins_over_the_name(tmp_path: Path) -> None:
    assert read(write(tmp_path, "x.csv", JSONL), format="jsonl") == ROWS
    assert read(write(tmp_path, "x", CSV), format="csv") == ROWS


NUMBERS = [{"n": str(number)} for number in range(25)]


@pytest.fixture
def number_files(tmp_path: Path) -> Path:
    lines = [json.dumps(row) for row in NUMBERS]
    write(tmp_path, "x.jsonl", "\n\n".join(lines))
    write(tmp_path, "x.json", f"[{','.join(lines)}]")
    write(tmp_path, "x.csv", "n\n" + "\n".join(row["n"] for row in NUMBERS))
    write(tmp_path, "x.txt", "\n".join(row["n"] for row in NUMBERS))
    pq.write_table(pa.Table.from_pylist(NUMBERS), tmp_path / "x.parquet", row_group_size=4)
    return tmp_path


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv", "x.txt", "x.parquet"])
@pytest.mark.parametrize(
    "bounds", [(0, None), (0, 25), (3, 9), (8, 12), (24, 99), (25, 30), (5, 5)]
)
def test_range_of_rows(
    number_files: Path, monkeypatch: pytest.MonkeyPatch, name: str, bounds: tuple[int, int | None]
) -> None:
    for module in (batches, parquet_format):
        monkeypatch.setattr(module, "BATCH_ROWS", 3)
    start, stop = bounds
    found = [next(iter(row.values())) for row in read(number_files / name, start, stop)]
    assert found == [row["n"] for row in NUMBERS][start:stop]


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv", "x.txt", "x.parquet"])
def test_rows_are_counted_as_they_are_read(number_files: Path, name: str) -> None:
    path = str(number_files / name)
    reader = FilesReader(FilesSource(type="files", path=path), [])
    assert reader.num_rows(SourceFile(path, name)) == 25


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv", "x.txt", "x.parquet"])
@pytest.mark.parametrize(("limit", "is_known"), [(None, True), (3, False)])
def test_content_hash_is_known_of_files_read_whole(
    number_files: Path, name: str, limit: int | None, is_known: bool
) -> None:
    path = number_files / name
    path.write_bytes(path.read_bytes() + (b"\n" * (2 << 20) if name == "x.jsonl" else b""))
    source = FilesSource(type="files", path=str(path), limit=limit)
    reader = FilesReader(source, [SourceFile(str(path), name)])
    assert sum(len(batch) for batch in reader.batches()) == (limit or 25)
    (file,) = reader.inputs["files"]
    assert file["bytes"] == path.stat().st_size
    digest = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    # A small file is in memory whole when its first rows are taken.
    expected = digest if is_known or name not in ("x.jsonl", "x.parquet") else None
    assert file["blake2b"] == expected


@given(
    st.lists(
        st.dictionaries(
            st.text(max_size=4),
            st.text(max_size=30) | st.lists(st.floats(allow_nan=False) | st.none(), max_size=3),
            max_size=3,
        ),
        max_size=8,
    ),
    st.integers(1, 40),
    st.booleans(),
)
@settings(deadline=None)
def test_json_array_is_read_through_any_buffer(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], read_bytes: int, ascii_only: bool
) -> None:
    text = json.dumps(rows, ensure_ascii=ascii_only, indent=1)
    path = write(tmp_path_factory.mktemp("json"), "x.json", text.encode("utf-8"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_format, "READ_BYTES", read_bytes)
        assert read(path) == rows


def test_broken_json_array_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_format, "READ_BYTES", 100)
    path = write(tmp_path, "x.json", '[{"a": 1}, {"a" 2}, ' + '{"a": 3},' * 100_000)
    with path.open("rb") as file:
        with pytest.raises(ValueError, match="object 2: not valid JSON"):
            list(json_format.read_json(file, "x.json", 0, None))
        assert file.tell() < 1000


def test_files_by_url() -> None:
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/source/x.jsonl.gz", gzip.compress(JSONL.encode()))
    source = FilesSource(type="files", path="memory://source/x.jsonl.gz")
    (batch,) = FilesReader(source, [SourceFile("/source/x.jsonl.gz", "x.jsonl.gz")]).batches()
    assert batch.rows == ROWS


# --- Hugging Face ------------------------------------------------------------------------------


def make_dataset(folder: Path) -> str:
    rows = {
        "text": [f"t{number}" for number in range(2500)],
        "chat": [[{"role": "user", "content": "hi"}]] * 2500,
        "label": [number % 2 for number in range(2500)],
    }
    features = datasets.Features(
        {
            "text": datasets.Value("large_string"),
            "chat": datasets.List(
                {"role": datasets.Value("string"), "content": datasets.Value("string")}
            ),
            "label": datasets.ClassLabel(names=["no", "yes"]),
        }
    )
    train = datasets.Dataset.from_dict(rows, features=features)
    splits = datasets.DatasetDict({"train": train, "test": train.select(range(3))})
    splits.save_to_disk(folder / "dict")
    train.save_to_disk(folder / "plain")
    return str(folder / "dict")


def read_dataset(start: int = 0, stop: int | None = None, **options: Any) -> list[Any]:
    reader = HuggingFaceReader(HuggingFaceSource(type="huggingface", **options), start, stop)
    return [row for batch in reader.batches() for row in batch.rows.to_pylist()]  # type: ignore[union-attr]


@pytest.mark.parametrize("streaming", [False, True])
def test_dataset_from_a_folder(tmp_path: Path, streaming: bool) -> None:
    folder = make_dataset(tmp_path)
    rows = read_dataset(dataset=folder, streaming=streaming)
    assert len(rows) == 2500
    assert rows[1] == {"text": "t1", "chat": [{"role": "user", "content": "hi"}], "label": 1}
    some = read_dataset(1200, 2300, dataset=folder, streaming=streaming, limit=1050)
    assert [row["text"] for row in some] == [f"t{number}" for number in range(1200, 2250)]
    assert len(read_dataset(2400, 2700, dataset=folder, streaming=streaming)) == 100
    assert len(read_dataset(dataset=folder, split="test", streaming=streaming)) == 3
    assert len(read_dataset(dataset=str(tmp_path / "plain"), streaming=streaming)) == 2500


def test_dataset_says_what_was_read(tmp_path: Path) -> None:
    source = HuggingFaceSource(type="huggingface", dataset=make_dataset(tmp_path))
    reader = HuggingFaceReader(source)
    assert sum(len(batch) for batch in reader.batches()) == 2500 == reader.num_rows()
    assert reader.inputs["split"] == "train"
    assert reader.inputs["fingerprint"]


@pytest.mark.parametrize(
    ("folder", "split", "message"),
    [
        ("dict", "dev", r"source\.split: .* no split 'dev', it has train, test; set source\.split"),
        ("plain", "dev", r"source\.split: .* no split 'dev', it has train;"),
        (
            ".",
            "train",
            r"source\.dataset: .* not written by save_to_disk; .* source\.type to files",
        ),
    ],
)
def test_dataset_that_is_not_there(tmp_path: Path, folder: str, split: str, message: str) -> None:
    make_dataset(tmp_path)
    with pytest.raises(ValueError, match=message):
        read_dataset(dataset=str(tmp_path / folder), split=split)
