"""Object storage: conditions, retries, listings and messages, against moto's S3 server.

Also what stands before it in place of Google's, where the requests are others.
"""

import io
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest

from bulk_pipeline import scan_table
from bulk_pipeline.spec import FilesSource
from bulk_pipeline.stages.ingest import ingest_partition
from bulk_pipeline.stages.partitions import list_files, plan_partitions
from bulk_pipeline.storage.objects import ChangedError, ObjectStorage, StorageError
from bulk_pipeline.storage.partition import Partition
from bulk_pipeline.storage.partition_writer import PartitionWriter
from bulk_pipeline.storage.schemas import OUTPUT, RAW_DATASET
from bulk_pipeline.storage.store import Store
from bulk_pipeline_tests.factories import make_spec, read_rows
from bulk_pipeline_tests.s3 import S3

SCHEMA = pa.schema([("row_index", pa.int64()), ("text", pa.string())])
QUICK = {"retry_config": {"max_retries": 2, "backoff": {"init_backoff": 0.01}}}


@pytest.fixture
def storage(server: S3) -> ObjectStorage:
    return ObjectStorage(server.scheme, **QUICK)


def write_part(writer: PartitionWriter, *indices: int):
    with writer.new_part(SCHEMA) as part_writer:
        part_writer.write(
            pa.table({"row_index": list(indices), "text": [f"text {i}" for i in indices]}, SCHEMA)
        )
    return part_writer.part


def commit(partition: Partition, *indices: int) -> None:
    with partition.writer() as writer:
        writer.commit([write_part(writer, *indices)], complete=True)


def indices(partition: Partition) -> list[int]:
    return [row["row_index"] for batch in partition.read() for row in batch.to_pylist()]


def once(status: int, method: str, key_part: str = ""):
    """A fault that happens to the first request of a kind."""
    left = [status]
    return lambda m, key: left.pop() if left and m == method and key_part in key else None


# --- conditions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["s3", "google", "memory"])
def test_an_object_is_replaced_only_as_it_was_seen(kind, request, tmp_path):
    if kind == "memory":
        root = f"memory://{tmp_path.name}"
    else:
        root = request.getfixturevalue(kind).new_bucket()
    storage, path = ObjectStorage(root.partition(":")[0]), f"{root}/a"
    first = storage.replace(path, b"first", None)
    with pytest.raises(ChangedError):
        storage.replace(path, b"again", None)
    second = storage.replace(path, b"second", first)
    with pytest.raises(ChangedError):
        storage.replace(path, b"third", first)
    assert storage.read_version(path) == (b"second", second)
    storage.rm_file(path)
    with pytest.raises(ChangedError):
        storage.replace(path, b"third", second)
    assert not storage.exists(path)


def test_a_put_whose_answer_got_lost_counts(server, storage):
    path = f"{server.new_bucket()}/a"
    server.after = once(500, "PUT")
    seen = storage.replace(path, b"first", None)
    server.after = once(500, "PUT")
    seen = storage.replace(path, b"second", seen)
    assert storage.read_version(path) == (b"second", seen)


def test_a_put_that_failed_while_another_succeeded_does_not_count(server, storage):
    bucket = server.new_bucket()

    def other_is_first(method: str, key: str) -> int | None:
        if method != "PUT" or b"other" in server.client().list_objects_v2(Bucket=bucket[5:]).get(
            "x", b""
        ):
            return None
        server.fill(bucket, ["a"], b"other")
        return 500

    server.before = other_is_first
    with pytest.raises(ChangedError):
        storage.replace(f"{bucket}/a", b"ours", None)
    assert storage.cat_file(f"{bucket}/a") == b"other"


def test_a_server_that_does_not_heed_conditions_is_refused(server):
    server.heeds_conditions = False
    store = Store(f"{server.new_bucket()}/tables", "data", QUICK)
    message = (
        r"(s3|gs)://test-\w+/tables/data/raw_dataset/all/manifest\.json: the server takes no "
        r"notice of conditions on a PUT .* use another"
    )
    with pytest.raises(StorageError, match=message), store.partition(RAW_DATASET, "all").writer():
        pass


# --- two writers ---------------------------------------------------------------------------------


def overtake(partition: Partition, then) -> None:
    """Write a part; another writer commits the row 2; go on as if nothing had happened."""
    with partition.writer() as first:
        part = write_part(first, 1)
        commit(partition, 2)
        then(first, part)


@pytest.mark.parametrize(
    "then",
    [
        lambda first, part: first.commit([part], complete=True),
        lambda first, part: list(first.partition.read_part(part)),
        lambda first, part: first.clear_away() or first.commit([], complete=True),
    ],
    ids=["commits", "reads what was cleared away", "clears away"],
)
def test_a_writer_that_was_overtaken_fails_with_one_line_and_harms_nothing(server, then):
    partition = Store(server.new_bucket(), "data").partition(RAW_DATASET, "all")
    commit(partition, 0)
    message = "data/raw_dataset/all is being written by a run on .*; wait for it or stop it"
    with pytest.raises(RuntimeError, match=message):
        overtake(partition, then)
    assert indices(partition) == [2]
    commit(partition, 3)
    assert indices(partition) == [3]


def test_of_many_writers_at_once_each_commit_is_whole(server):
    root, barrier = server.new_bucket(), threading.Barrier(4)

    def write(number: int) -> dict[int, list[int]]:
        """What was committed, by epoch."""
        partition = Store(root, "data").partition(RAW_DATASET, "all")
        barrier.wait()
        committed = {}
        for turn in range(6):
            with suppress(RuntimeError), partition.writer() as writer:
                writer.commit([write_part(writer, number, 10 + turn)], complete=True)
                committed[writer.manifest.epoch] = [number, 10 + turn]
        return committed

    with ThreadPoolExecutor(4) as pool:
        committed = list(pool.map(write, range(4)))
    epochs = [epoch for each in committed for epoch in each]
    assert len(set(epochs)) == len(epochs)
    last = max(epochs)
    partition = Store(root, "data").partition(RAW_DATASET, "all")
    assert [each[last] for each in committed if last in each] == [indices(partition)]


def test_keys_that_two_machines_give_at_once_are_all_kept(s3):
    """Both see a file of a name that is taken once cleaned; the second finds the first's key."""
    root = s3.new_bucket()
    spec = make_spec(root, source={"path": f"{root}/in"}, partitions={"by": "file"})
    store = Store(spec.output.root, spec.name)
    s3.fill(root, ["in/a b.jsonl"], b'{"text": "one"}\n')
    others: list[dict] = []

    def other_machine(method: str, key: str) -> None:
        if method == "PUT" and key.endswith("partitions.json") and not others:
            others.append({})  # not again for its own request
            s3.fill(root, ["in/a_b.jsonl"], b'{"text": "two"}\n')
            others[0] = {k: s.files[0].relative for k, s in plan_partitions(spec, store).items()}

    s3.before = other_machine
    plan = {key: each.files[0].relative for key, each in plan_partitions(spec, store).items()}
    assert plan == others[0]
    assert sorted(plan.values()) == ["a b.jsonl", "a_b.jsonl"]


# --- retries and messages ------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_passes_is_tried_again(server, status):
    failed: set[tuple[str, str]] = set()

    def each_once(method: str, key: str) -> int | None:
        kind = (method, re.sub("[0-9a-f]{32}", "", key))
        if kind in failed:
            return None
        failed.add(kind)
        return status

    partition = Store(server.new_bucket(), "data", QUICK).partition(RAW_DATASET, "all")
    server.before = each_once
    commit(partition, 0)
    commit(partition, 1, 2)
    assert indices(partition) == [1, 2]
    assert {method for method, _ in failed} >= {"GET", "PUT", "HEAD"}


def test_refused_access_is_one_line(server):
    root = server.new_bucket()
    server.before = lambda method, key: 403
    message = rf"^{root}/data/x\.json: access was refused \(403 Forbidden AccessDenied\); the cred"
    with pytest.raises(StorageError, match=message) as error:
        Store(root, "data").read_json("x.json")
    assert "\n" not in str(error.value)
    with pytest.raises(StorageError, match=rf"^{root}/data/output: access was refused"):
        Store(root, "data").partition_keys(OUTPUT)


@pytest.mark.parametrize(
    ("kind", "variables"),
    [
        ("s3", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        ("google", "GOOGLE_APPLICATION_CREDENTIALS"),
    ],
)
def test_credentials_that_do_not_count_are_named_as_the_server_wants_them(kind, variables, request):
    server = request.getfixturevalue(kind)
    root = server.new_bucket()
    server.before = lambda method, key: 401
    message = rf"/data/x\.json: no valid credentials \(401 .*\); .* such as {variables}, or give"
    with pytest.raises(StorageError, match=message):
        Store(root, "data").read_json("x.json")


def test_a_missing_bucket_is_no_empty_table(server):
    store = Store(f"{server.scheme}://nowhere-at-all/tables", "data")
    message = (
        r"(s3|gs)://nowhere-at-all/tables/.*: there is no bucket nowhere-at-all; make it, or corr"
    )
    with pytest.raises(StorageError, match=message):
        store.partition(RAW_DATASET, "all").manifest()
    with pytest.raises(StorageError, match=message):
        store.partition_keys(RAW_DATASET)


def test_a_server_that_stays_down_is_one_line(s3):
    options = QUICK | {"endpoint": "http://127.0.0.1:9"}
    message = (
        r"s3://b/data/x\.json: the storage does not answer as it should \(.*\); check endpoint"
    )
    with pytest.raises(StorageError, match=message):
        Store("s3://b", "data", options).read_json("x.json")


def test_trouble_on_the_way_is_not_taken_for_a_damaged_part(s3):
    partition = Store(s3.new_bucket(), "data", QUICK).partition(RAW_DATASET, "all")
    commit(partition, 0)
    s3.before = lambda method, key: 503 if method == "GET" and "part-" in key else None
    with pytest.raises(StorageError, match=r"does not answer as it should \(503 S.*SlowDown\)"):
        indices(partition)


def test_an_unknown_option_is_named(s3):
    with pytest.raises(ValueError, match="storage_options: Configuration key: 'key' is not valid"):
        Store("s3://b", "data", {"key": "x"}).read_json("x.json")


def test_a_root_of_another_kind_is_refused():
    message = (
        r"output\.root must be a folder or a URL that starts with one of s3://, .* 'sftp://h/x'"
    )
    with pytest.raises(ValueError, match=message):
        Store("sftp://h/x", "data")


# --- listings and requests -----------------------------------------------------------------------


def test_a_partition_of_many_parts_is_looked_at_a_thousand_names_a_request(server):
    root = server.new_bucket()
    partition = Store(root, "data").partition(RAW_DATASET, "all")
    with partition.writer() as writer:
        part = write_part(writer, 0)
        copies = [part.model_copy(update={"name": f"part-{i:05}.parquet"}) for i in range(2500)]
        data = server.client().get_object(Bucket=root[5:], Key=f"data/raw_dataset/all/{part.name}")
        server.fill(root, [f"data/raw_dataset/all/{c.name}" for c in copies], data["Body"].read())
        writer.commit(copies, complete=True)
    server.requests.clear()
    with partition.writer() as writer:
        assert len(writer.manifest.parts) == 2500
        assert (writer.lost, writer.set_aside) == ([], [f"{partition.path}/_set_aside/{part.name}"])
    assert "HEAD" not in server.counts() or server.counts()["HEAD"] == 0
    lists = [
        query for method, _, query in server.requests if method == "GET" and "list-type" in query
    ]
    assert len(lists) == 3


def test_partitions_are_listed_beyond_a_thousand(s3):
    root = s3.new_bucket()
    names = [f"p{i:04}" for i in range(1500)]
    s3.fill(root, [f"data/output/{name}/{file}" for name in names for file in ("a", "b")])
    s3.requests.clear()
    assert Store(root, "data").partition_keys(OUTPUT) == names
    assert s3.counts() == {"GET": 2}


def test_the_requests_of_a_commit_are_few(server):
    partition = Store(server.new_bucket(), "data").partition(RAW_DATASET, "all")
    commit(partition, 0)  # with two requests that try the server's conditions
    server.requests.clear()
    with partition.writer() as writer:
        assert server.counts() == {"GET": 2, "PUT": 1}  # the manifest and a listing; the epoch
        part = write_part(writer, 1)
        assert server.counts() == {"GET": 2, "PUT": 2}
        writer.commit([*writer.manifest.parts, part], complete=True)
        assert server.counts() == {"GET": 2, "PUT": 3}
    server.requests.clear()
    partition.manifest()
    assert server.counts() == {"GET": 1}


def test_a_large_part_arrives_in_pieces_or_not_at_all(server, storage):
    root = server.new_bucket()
    data = os.urandom(12 << 20)
    storage.upload(f"{root}/whole", io.BytesIO(data))
    assert storage.cat_file(f"{root}/whole") == data
    assert storage.cat_file(f"{root}/whole", 6 << 20, (6 << 20) + 9) == data[6 << 20 :][:9]
    server.before = lambda method, key: 403 if method == "PUT" and "torn" in key else None
    with pytest.raises(StorageError, match="access was refused"):
        storage.upload(f"{root}/torn", io.BytesIO(data))
    assert server.keys(root) == ["whole"]


def test_a_table_is_scanned_lazily(server):
    root = server.new_bucket()
    store = Store(root, "data")
    for number, key in enumerate(("a", "b")):
        commit(store.partition(OUTPUT, key), number, number + 10)
    rows = scan_table(root, "data").filter(pl.col("row_index") > 5).select("text", "partition")
    assert rows.collect().rows() == [("text 10", "a"), ("text 11", "b")]


# --- sources -------------------------------------------------------------------------------------


def test_rows_are_read_from_s3(s3, tmp_path):
    root = s3.new_bucket()
    s3.fill(root, ["in/a.jsonl"], b'{"text": "one"}\n{"text": "two"}\n')
    s3.fill(root, ["in/deep/b.jsonl", "in/_hidden.jsonl"], b'{"text": "three"}\n')
    parquet = io.BytesIO()
    pl.DataFrame({"text": ["four"]}).write_parquet(parquet)
    s3.fill(root, ["in/c.parquet"], parquet.getvalue())
    spec = make_spec(tmp_path, source={"path": f"{root}/in"}, output={"root": f"{root}/tables"})
    store = Store(spec.output.root, spec.name)
    files = list_files(spec.source)
    assert [file.relative for file in files] == ["a.jsonl", "c.parquet", "deep/b.jsonl"]
    assert all(file.modified and file.version.count(":") >= 2 for file in files)
    assert ingest_partition(spec, store, "all").rows == 4
    assert [row["text"] for row in read_rows(store, RAW_DATASET)] == ["one", "two", "four", "three"]


def test_one_listing_finds_the_files_of_all_folders(s3):
    root = s3.new_bucket()
    s3.fill(root, [f"in/{i:02}/{j:03}.txt" for i in range(20) for j in range(60)], b"x")
    s3.requests.clear()
    assert len(list_files(FilesSource(path=f"{root}/in"))) == 1200
    lists = [query for _, _, query in s3.requests if "list-type" in query]
    assert len(lists) <= 6


def test_a_source_that_is_not_there_is_named(s3):
    root = s3.new_bucket()
    with pytest.raises(ValueError, match=rf"source\.path: no files match '{root}/in/\*\.csv'"):
        list_files(FilesSource(path=f"{root}/in/*.csv"))
    with pytest.raises(StorageError, match="there is no bucket nowhere-at-all"):
        list_files(FilesSource(path="s3://nowhere-at-all/in/*.csv"))


def test_profiles_without_boto3_are_an_error(s3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("AWS_PROFILE", "work")
    monkeypatch.setitem(__import__("sys").modules, "obstore.auth.boto3", None)
    with pytest.raises(ValueError, match="AWS_PROFILE is set, and profiles are read by boto3; pip"):
        Store("s3://b", tmp_path.name, {"region": "eu-north-1"})
