"""From a source to raw_dataset: the same values back, and ids that stay."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulk_pipeline.stages import ingest
from bulk_pipeline.stages.formats import batch as batches
from bulk_pipeline.stages.ingest import id_columns, ingest_partition, number_occurrences
from bulk_pipeline.stages.stage_report import StageReport
from bulk_pipeline.storage.manifest import Manifest
from bulk_pipeline.storage.schemas import OUR_COLUMNS, RAW_DATASET
from bulk_pipeline_tests.factories import make_spec, make_store, read_rows

OURS = ("row_id", "row_index", "row_error")


def write_jsonl(path: Path, rows: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8", "surrogatepass")


def run(root: Path, **changes: Any) -> StageReport:
    spec = make_spec(root, **changes)
    return ingest_partition(spec, make_store(spec), "all")


def table(root: Path) -> list[dict[str, Any]]:
    return read_rows(make_store(make_spec(root)), RAW_DATASET)


def manifest(root: Path) -> Manifest:
    found = make_store(make_spec(root)).partition(RAW_DATASET, "all").manifest()
    assert found
    return found


def schema(root: Path) -> pa.Schema:
    return make_store(make_spec(root)).partition(RAW_DATASET, "all").schema()


def ingest_rows(root: Path, rows: list[Any], **changes: Any) -> list[dict[str, Any]]:
    write_jsonl(root / "source.jsonl", rows)
    run(root, **changes)
    return table(root)


def ids(rows: list[dict[str, Any]]) -> list[str]:
    return [row["row_id"] for row in rows]


def test_table_is_the_source_columns_then_ours(tmp_path: Path) -> None:
    rows = ingest_rows(tmp_path, [{"text": "a", "n": 1}, {"n": 2, "text": "b", "late": [1.5]}])
    assert list(rows[0]) == ["text", "n", "late", *OURS]
    assert [(row["text"], row["n"], row["late"]) for row in rows] == [
        ("a", 1, None),
        ("b", 2, [1.5]),
    ]
    assert [row["row_index"] for row in rows] == [0, 1]
    assert [row["row_error"] for row in rows] == [None, None]


def test_report_and_manifest_say_what_was_read(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "source.jsonl", [{"text": "a", "prompt": 1}, {"text": 2}])
    report = run(tmp_path)
    assert (report.partition, report.rows) == ("all", 2)
    assert report.metadata["renamed_columns"] == {"prompt": "source_prompt"}
    written = manifest(tmp_path)
    assert written.complete
    assert written.meta["json_text_columns"] == ["text"]
    assert written.meta["id_columns"] == ["text"]
    (file,) = written.inputs["files"]
    assert file["path"] == "source.jsonl"
    assert file["bytes"] == (tmp_path / "source.jsonl").stat().st_size


def test_recorded_content_hash_follows_content_not_time(tmp_path: Path) -> None:
    def digest(rows: list[Any]) -> str:
        ingest_rows(tmp_path, rows)
        return manifest(tmp_path).inputs["files"][0]["blake2b"]

    assert digest([{"text": "a"}]) == digest([{"text": "a"}]) != digest([{"text": "b"}])


@pytest.mark.parametrize(
    ("values", "type_", "back"),
    [
        ([1, 2.5], pa.float64(), [1.0, 2.5]),
        ([2**53 + 1, 2.5], None, [str(2**53 + 1), "2.5"]),
        ([1, "a", None], None, ["1", '"a"', None]),
        ([True, 1], None, ["true", "1"]),
        ([1.5, True], None, ["1.5", "true"]),
        ([[1.5], [True]], None, ["[1.5]", "[true]"]),
        ([2**63, 1], None, [str(2**63), "1"]),
        ([2**70], None, [str(2**70)]),
        ([-(2**63), 2**63 - 1], pa.int64(), [-(2**63), 2**63 - 1]),
        ([{}, {}], None, ["{}", "{}"]),
        ([{}, {"a": 1}], pa.struct([("a", pa.int64())]), [{"a": None}, {"a": 1}]),
        ([{"a": 1}, {"a": "é"}], None, ['{"a": 1}', '{"a": "é"}']),
        ([[1], "a"], None, ["[1]", '"a"']),
        ([["a"], "b"], None, ['["a"]', '"b"']),
        ([None, None], pa.null(), [None, None]),
        (["\U0001f600", "a\0b"], pa.string(), ["\U0001f600", "a\0b"]),
        ([[], [None, {"b": [1]}]], pa.list_(pa.struct([("b", pa.list_(pa.int64()))])), None),
    ],
    ids=str,
)
@pytest.mark.parametrize("batch_rows", [1, 1000])
def test_column_type_follows_from_all_values(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    batch_rows: int,
    values: list[Any],
    type_: pa.DataType | None,
    back: list[Any] | None,
) -> None:
    monkeypatch.setattr(batches, "BATCH_ROWS", batch_rows)
    rows = ingest_rows(tmp_path, [{"text": "t", "value": value} for value in values])
    assert [row["value"] for row in rows] == (values if back is None else back)
    is_text = manifest(tmp_path).meta["json_text_columns"] == ["value"]
    assert is_text == (type_ is None)
    found = schema(tmp_path).field("value").type
    assert found == (type_ or pa.string()) or pa.types.is_nested(found)


def test_wide_and_deep_values_become_json_text(tmp_path: Path) -> None:
    wide = {f"key {number}": number for number in range(201)}
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    (row,) = ingest_rows(tmp_path, [{"text": "t", "wide": wide, "deep": deep}])
    assert json.loads(row["wide"]) == wide
    assert json.loads(row["deep"]) == deep


def test_keys_that_are_data_do_not_become_fields(tmp_path: Path) -> None:
    rows = ingest_rows(tmp_path, [{"text": "t", "map": {f"k{n}": n}} for n in range(300)])
    assert rows[299]["map"] == '{"k299": 299}'


def test_columns_named_like_ours_are_renamed_without_clash(tmp_path: Path) -> None:
    row = {"text": "t", "row_id": "mine", "source_row_id": "also mine", "seed": 1}
    (stored,) = ingest_rows(tmp_path, [row])
    assert stored["source_row_id"] == "also mine"
    assert stored["source_source_row_id"] == "mine"
    assert stored["source_seed"] == 1
    assert len(stored["row_id"]) == 32


def test_every_column_of_ours_can_be_a_source_column(tmp_path: Path) -> None:
    source = {name: f"value of {name}" for name in sorted(OUR_COLUMNS)}
    (stored,) = ingest_rows(tmp_path, [source], prompt={"column": "prompt"})
    assert {name: stored[f"source_{name}"] for name in source} == source


def test_prompt_column_is_meant_by_its_name_in_the_source(tmp_path: Path) -> None:
    first = ingest_rows(tmp_path, [{"prompt": "a"}, {"prompt": "b"}], prompt={"column": "prompt"})
    assert len(set(ids(first))) == 2
    assert not any("-" in row_id for row_id in ids(first))


@pytest.mark.parametrize("content", ["", "\n\n", "\ufeff"])
def test_file_without_rows_is_a_partition_without_rows(tmp_path: Path, content: str) -> None:
    (tmp_path / "source.jsonl").write_text(content)
    assert run(tmp_path, source={"path": f"{tmp_path}/source.jsonl", "id_column": "id"}).rows == 0
    assert schema(tmp_path).names == list(OURS)
    assert table(tmp_path) == []


def test_limit_counts_over_all_files(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in/a.jsonl", [{"text": "a"}, {"text": "b"}])
    write_jsonl(tmp_path / "in/b.jsonl", [{"text": "c"}, {"text": "d"}])
    run(tmp_path, source={"path": f"{tmp_path}/in", "limit": 3})
    assert [row["text"] for row in table(tmp_path)] == ["a", "b", "c"]


def test_formats_of_one_partition_may_differ(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in/a.jsonl", [{"text": "a", "n": 1, "x": 2**53 + 1}])
    (tmp_path / "in/b.csv").write_text("text,n\nb,007\n")
    pq.write_table(pa.table({"text": ["c"], "x": [0.5]}), tmp_path / "in/c.parquet")
    run(tmp_path, source={"path": f"{tmp_path}/in"})
    rows = [(row["text"], row["n"], row["x"]) for row in table(tmp_path)]
    assert rows == [("a", "1", str(2**53 + 1)), ("b", '"007"', None), ("c", None, "0.5")]


def test_bad_text_is_shown_and_named(tmp_path: Path) -> None:
    lines = [b'{"text": "fine", "o": 1}', b'{"text": "a\\ud800b"}', b'{"text": "c\xffd"}']
    (tmp_path / "source.jsonl").write_bytes(b"\n".join(lines))
    report = run(tmp_path)
    rows = table(tmp_path)
    assert [row["text"] for row in rows] == ["fine", "a\\ud800b", "c\\xffd"]
    assert rows[0]["row_error"] is None
    assert "column 'text' holds half a character" in rows[1]["row_error"]
    assert "column 'text' holds bytes that are not UTF-8" in rows[2]["row_error"]
    assert report.metadata["row_errors"] == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": {"column": "q"}}, r"prompt\.column: .* no column 'q', it has text, n;"),
        ({"prompt": {"messages_column": "q"}}, r"prompt\.messages_column: .* no column 'q'"),
        ({"prompt": {"column": "text", "system_column": "q"}}, r"prompt\.system_column: .* 'q'"),
        ({"source": {"id_column": "q"}}, r"source\.id_column: .* no column 'q', it has text, n;"),
        ({"source": {"id_columns": ["text", "q"]}}, r"source\.id_columns: .* no column 'q'"),
        ({"prompt": {"template": "{{ text"}}, r"prompt\.template: line 1 is not valid Jinja"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_missing_column_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_jsonl(tmp_path / "source.jsonl", [{"text": "a", "n": 1}])
    if "source" in changes:
        changes = {"source": {"path": f"{tmp_path}/source.jsonl", **changes["source"]}}
    with pytest.raises(ValueError, match=message) as error:
        run(tmp_path, **changes)
    assert "\n" not in str(error.value)


def test_unknown_partition_is_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "source.jsonl", [{"text": "a"}])
    spec = make_spec(tmp_path)
    with pytest.raises(ValueError, match=r"partition 'gone' is not in the source .*\(all\)"):
        ingest_partition(spec, make_store(spec), "gone")


def test_failure_keeps_the_table_of_before_and_no_temporary_file(tmp_path: Path) -> None:
    before = ingest_rows(tmp_path, [{"text": "a"}])
    (tmp_path / "source.jsonl").write_text('{"text": "b"}\n{"text": ')
    with pytest.raises(ValueError, match="line 2"):
        run(tmp_path)
    assert table(tmp_path) == before
    files = {path.name for path in (tmp_path / "tables/data/raw_dataset/all").iterdir()}
    assert {name for name in files if not name.startswith("part-")} <= {"manifest.json", ".lock"}


# --- ids ---------------------------------------------------------------------------------------


def test_equal_rows_are_numbered(tmp_path: Path) -> None:
    first, second, other, third = ids(
        ingest_rows(tmp_path, [{"text": "a"}, {"text": "a"}, {"text": "b"}, {"text": "a"}])
    )
    assert (second, third) == (f"{first}-1", f"{first}-2")
    assert len(first) == len(other) == 32


@pytest.mark.parametrize(
    ("prompt", "columns"),
    [
        ({"column": "a"}, ["a"]),
        ({"messages_column": "m", "system_column": "s"}, ["m", "s"]),
        ({"template": "{{ b }} {% for x in a %}{{ x }}{{ loop.index }}{% endfor %}"}, ["a", "b"]),
        ({"template": "Say hi."}, []),
    ],
    ids=str,
)
def test_id_is_made_of_what_the_prompt_reads(
    tmp_path: Path, prompt: dict[str, Any], columns: list[str]
) -> None:
    assert id_columns(make_spec(tmp_path, prompt=prompt)) == columns


def test_prompt_without_columns_still_has_unique_ids(tmp_path: Path) -> None:
    rows = ingest_rows(tmp_path, [{"a": 1}, {"a": 2}], prompt={"template": "Say hi."})
    assert len(set(ids(rows))) == 2


def test_id_does_not_depend_on_the_format(tmp_path: Path) -> None:
    rows = [{"text": "a", "n": 1, "s": {"x": 1, "y": None}}, {"text": "b", "n": None, "s": None}]
    source = {"id_columns": ["text", "n", "s"]}
    pq.write_table(
        pa.Table.from_pylist(rows).cast(
            pa.schema(
                [
                    ("text", pa.large_string()),
                    ("n", pa.float64()),
                    ("s", pa.struct([("y", pa.string()), ("x", pa.int32())])),
                ]
            )
        ),
        tmp_path / "p.parquet",
    )
    (tmp_path / "j.json").write_text(
        json.dumps([{"text": "a", "n": 1.0, "s": {"x": 1}}, {"text": "b"}])
    )
    expected = ids(
        ingest_rows(tmp_path, rows, source={"path": f"{tmp_path}/source.jsonl", **source})
    )
    for name in ("p.parquet", "j.json"):
        run(tmp_path, source={"path": f"{tmp_path}/{name}", **source})
        assert ids(table(tmp_path)) == expected, name


def test_own_ids_are_taken_as_they_are(tmp_path: Path) -> None:
    source = {"path": f"{tmp_path}/source.jsonl", "id_column": "id"}
    rows = ingest_rows(
        tmp_path, [{"text": "a", "id": 7}, {"text": "a", "id": "x-é"}], source=source
    )
    assert ids(rows) == ["7", "x-é"]


def test_duplicated_ids_are_counted_and_listed(tmp_path: Path) -> None:
    source = {"path": f"{tmp_path}/source.jsonl", "id_column": "id"}
    rows = [{"text": "t", "id": f"id {n % 12}"} for n in range(30)] + [{"text": "t", "id": "once"}]
    with pytest.raises(ValueError, match="must be unique") as error:
        ingest_rows(tmp_path, rows, source=source)
    message = str(error.value)
    assert "column 'id'" in message
    assert "12 values" in message
    assert message.count("'id ") == 10
    assert "once" not in message


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ({"text": "b"}, "has no value"),
        ({"id": None}, "has no value"),
        ({"id": [1]}, "is not text or a number"),
    ],
    ids=str,
)
def test_missing_id_names_the_row(tmp_path: Path, bad: dict[str, Any], problem: str) -> None:
    source = {"path": f"{tmp_path}/source.jsonl", "id_column": "id"}
    with pytest.raises(ValueError, match=rf"source\.id_column: column 'id' {problem} in row 1 "):
        ingest_rows(tmp_path, [{"text": "a", "id": 1}, bad], source=source)


@given(st.lists(st.integers(0, 5), max_size=60), st.integers(1, 20))
def test_occurrences_do_not_depend_on_buckets(values: list[int], bucket_rows: int) -> None:
    hashes = np.array([[value * 7, value % 2] for value in values], np.uint64).reshape(-1, 2)
    found = np.full(len(values), -1)
    number_occurrences(hashes, found, bucket_rows)
    assert found.tolist() == [values[:place].count(value) for place, value in enumerate(values)]


# --- any rows ----------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(["text", "a", "b", "é", "row_id", "", "source_row_id"])
any_rows = st.lists(st.dictionaries(names, values, max_size=4), max_size=12).map(
    lambda rows: [{"text": None, **row} for row in rows]
)


def without_nulls(value: Any) -> Any:
    """A typed column cannot tell a null from an absent key."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def source_values(root: Path) -> list[dict[str, Any]]:
    """The table's source columns, by the source's names, JSON text undone."""
    meta = manifest(root).meta
    original = {stored: name for name, stored in meta["renamed_columns"].items()}
    return [
        {
            original.get(name, name): json.loads(value)
            if name in meta["json_text_columns"] and value is not None
            else value
            for name, value in row.items()
            if name not in OURS
        }
        for row in table(root)
    ]


@given(any_rows, st.sampled_from([1, 3, 1000]))
@settings(deadline=None, max_examples=80)
def test_any_rows_come_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], batch_rows: int
) -> None:
    root = tmp_path_factory.mktemp("rows")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "BATCH_ROWS", batch_rows)
        ingest_rows(root, rows)
    back = source_values(root)
    assert without_nulls(back) == without_nulls(rows)
    kinds = [[type(value) for value in row.values() if isinstance(value, bool)] for row in rows]
    back_kinds = [
        [type(value) for value in row.values() if isinstance(value, bool)] for row in back
    ]
    assert [len(found) for found in back_kinds] == [len(found) for found in kinds]


@given(any_rows, any_rows, st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=40)
def test_ids_survive_order_growth_and_other_columns(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[dict[str, Any]],
    more: list[dict[str, Any]],
    chance: random.Random,
) -> None:
    root = tmp_path_factory.mktemp("ids")
    first = ids(ingest_rows(root, rows))
    assert len(set(first)) == len(rows)

    shuffled = chance.sample(rows, len(rows))
    assert sorted(ids(ingest_rows(root, shuffled))) == sorted(first)
    assert ids(ingest_rows(root, rows + more))[: len(rows)] == first
    unrelated = [{"other": chance.random(), **row} for row in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "BATCH_ROWS", 2)
        assert ids(ingest_rows(root, unrelated)) == first


def test_memory_is_bounded_by_batches_not_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    append = ingest.SpooledRows.append
    monkeypatch.setattr(
        ingest.SpooledRows,
        "append",
        lambda self, batch: (sizes.append(len(batch)), append(self, batch))[1],
    )
    monkeypatch.setattr(batches, "BATCH_BYTES", 100_000)
    ingest_rows(tmp_path, [{"text": "x" * 50_000} for _ in range(9)])
    assert sizes == [2, 2, 2, 2, 1]
