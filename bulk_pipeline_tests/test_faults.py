"""A process may end at any step of any stage: nothing is lost, little is done twice."""

import errno
import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from bulk_pipeline.stages.complete import complete_partition
from bulk_pipeline.stages.journal import GIVE_UP_AFTER, JOURNAL
from bulk_pipeline.storage.schemas import COMPLETIONS, OUTPUT, TABLES
from bulk_pipeline.storage.store import Store
from bulk_pipeline_tests.crash import KEY, Crashes
from bulk_pipeline_tests.factories import (
    EchoGenerator,
    make_prompt,
    make_spec,
    make_store,
    read_rows,
    stable,
    write_prompts,
)

NUM_ROWS, FLUSH_ROWS, BATCH = 12, 4, 4
WRITE = ("open", "flush", "sync", "replace", "sync folder")
FILES = ("manifest", "part", "piece", "output.jsonl", JOURNAL)
POINTS = [
    *(f"{file} {step}" for file in FILES for step in WRITE),
    "part write",
    "commit",
    "delete part",
    "delete piece",
    "journal append",
    "journal delete",
]
MOST_TRIED = 4  # times that a point is tried, the first and the last among them


@pytest.fixture(scope="module")
def crashes() -> Iterator[Crashes]:
    with Crashes() as crashes:
        yield crashes


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "source.jsonl"
    write_source(path, [f"question {i}" for i in range(NUM_ROWS)])
    return path


def write_source(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.fixture(scope="module")
def uninterrupted(crashes, source, toy_float64, tmp_path_factory) -> dict[str, Any]:
    """The report of a run that nothing disturbed, with its tables."""
    spec = real_spec(tmp_path_factory.mktemp("whole"), source, toy_float64)
    report = crashes.run(spec)
    assert report["exit"] == 0
    assert report["error"] is None
    return report | {"tables": stable_tables(spec)}


def real_spec(folder: Path, source: Path, model: Path, **changes: Any) -> dict[str, Any]:
    """The real generator over the float64 toy, flushed every four rows."""
    return {
        "name": "data",
        "source": {"path": str(source)},
        "prompt": {"column": "text"},
        "generator": {
            "model": str(model),
            "device": "cpu",
            "dtype": "float64",
            "max_batch_size": BATCH,
            "cache_tokens": 2048,
        },
        "sampling": {"temperature": 0.8, "max_new_tokens": 6},
        "output": {
            "root": str(folder / "tables"),
            "flush_rows": FLUSH_ROWS,
            "formats": ["jsonl"],
        },
    } | changes


def stable_tables(spec: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    store = Store(spec["output"]["root"], spec["name"])
    tables = {table: stable(read_rows(store, table)) for table in (COMPLETIONS, OUTPUT)}
    lines = Path(store.path, OUTPUT, KEY, "output.jsonl").read_text().splitlines()
    return tables | {"jsonl": [json.loads(line) for line in lines]}


def finished(spec: dict[str, Any]) -> Counter[str]:
    """How often each request was completed, over all runs."""
    return Counter((Path(spec["output"]["root"]).parent / "finished").read_text().split())


def stored_keys(spec: dict[str, Any]) -> list[str]:
    """The keys of the completions that the manifest names."""
    partition = Store(spec["output"]["root"], spec["name"]).partition(COMPLETIONS, KEY)
    manifest = partition.manifest()
    return [
        key
        for part in (manifest.parts if manifest else [])
        for batch in partition.read_part(part, ["request_key"])
        for key in batch["request_key"].to_pylist()
    ]


def leftovers(spec: dict[str, Any]) -> list[str]:
    """Files of interrupted writes."""
    root = Path(spec["output"]["root"])
    return [
        str(path)
        for path in root.rglob("*")
        if path.name.startswith(".tmp-") or path.name == JOURNAL
    ]


def times(passed: int, most: int) -> list[int]:
    """Which passes of a point are tried, from the first to the last."""
    tried = min(most, passed)
    return [1 + i * (passed - 1) // max(tried - 1, 1) for i in range(tried)]


def test_the_points_are_those_that_a_run_passes(uninterrupted):
    assert set(uninterrupted["points"]) == set(POINTS)


@pytest.mark.parametrize("signal_name", ["KILL", "TERM"])
@pytest.mark.parametrize("point", POINTS)
def test_a_run_that_ends_at_any_point_is_finished_by_the_next(
    crashes, source, toy_float64, uninterrupted, tmp_path, point, signal_name
):
    is_kill = signal_name == "KILL"
    for nth in times(uninterrupted["points"][point], MOST_TRIED if is_kill else 3):
        spec = real_spec(tmp_path / str(nth), source, toy_float64)
        stopped = crashes.run(spec, fault=f"{point}:{nth}:{signal_name}")
        assert (stopped["signal"], stopped["exit"]) == ((9, None) if is_kill else (None, 143))
        stored = stored_keys(spec)
        assert len(stored) == len(set(stored)), nth
        resumed = crashes.run(spec)
        assert resumed["error"] is None, nth
        assert stable_tables(spec) == uninterrupted["tables"], nth
        counts = finished(spec)
        assert len(counts) == NUM_ROWS
        repeated = counts.total() - NUM_ROWS
        assert repeated <= (FLUSH_ROWS if is_kill else 1), nth
        assert leftovers(spec) == []


# --- requests that kill the process --------------------------------------------------------------


def answer_spec(folder: Path, model: Path, texts: list[str], flush_rows: int = 4) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    write_source(folder / "source.jsonl", texts)
    output = {"root": str(folder / "tables"), "flush_rows": flush_rows, "formats": ["jsonl"]}
    return real_spec(folder, folder / "source.jsonl", model, output=output)


def poison_id(model: Path) -> int:
    """A token that stands in the poisoned prompt alone."""
    from transformers import AutoTokenizer

    (token,) = set(AutoTokenizer.from_pretrained(model).encode("§")[-1:])
    return token


@pytest.mark.parametrize("places", [[0], [19], [4, 5]], ids=str)
def test_a_row_that_kills_the_process_is_found_out(crashes, toy_float64, tmp_path, places):
    texts = [f"question {i}" + (" §" if i in places else "") for i in range(20)]
    spec = answer_spec(tmp_path, toy_float64, texts)
    order = {"generator": "answer", "poison": poison_id(toy_float64)}
    num_deaths = 0
    while (report := crashes.run(spec, **order))["signal"] == 9:
        num_deaths += 1
        assert num_deaths <= GIVE_UP_AFTER * len(places)
    assert report["error"] is None
    assert num_deaths >= GIVE_UP_AFTER
    rows = read_rows(Store(spec["output"]["root"], "data"), COMPLETIONS)
    statuses = [row["status"] for row in rows]
    assert statuses == ["error" if i in places else "stop" for i in range(20)]
    for place in places:
        assert (
            f"{GIVE_UP_AFTER} runs failed with this request in generation" in rows[place]["error"]
        )
    assert leftovers(spec) == []

    again = crashes.run(spec, **order)  # it is not tried again by itself
    assert again["metadata"][2]["requests_run"] == 0
    redone = crashes.run(spec, generator="answer", redo=["error"])  # but when asked for
    assert redone["metadata"][2]["requests_run_redo"] == len(places)
    assert redone["metadata"][2]["status_stop"] == 20


def test_an_exception_or_a_termination_counts_against_no_row(crashes, toy_float64, tmp_path):
    spec = answer_spec(tmp_path, toy_float64, [f"question {i}" for i in range(8)])
    for _ in range(GIVE_UP_AFTER + 1):
        assert crashes.run(spec, generator="answer", fault="journal append:3:TERM")["exit"] == 143
        assert leftovers(spec) == []
    assert crashes.run(spec, generator="answer")["metadata"][2]["status_stop"] == 8


def test_an_exception_of_the_generator_turns_no_row_into_an_error(tmp_path):
    spec = make_spec(tmp_path, output={"flush_rows": 2})
    store = make_store(spec)
    write_prompts(store, [make_prompt(i) for i in range(6)])
    for _ in range(GIVE_UP_AFTER + 2):
        with pytest.raises(RuntimeError, match="the generator broke"):
            complete_partition(spec, store, KEY, lambda: EchoGenerator(fails_at=[3]), "model")
    complete_partition(spec, store, KEY, EchoGenerator, "model")
    assert {row["status"] for row in read_rows(store, COMPLETIONS)} == {"stop"}


# --- disks ---------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 400 KiB, where this may be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_fills_up_is_named_and_what_was_finished_stays(small_disk):
    spec = make_spec(small_disk, output={"flush_rows": 5})
    store = make_store(spec)
    write_prompts(store, [make_prompt(i) for i in range(60)])
    ballast = small_disk / "ballast"
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    ballast.write_bytes(bytes(free - (120 << 10)))
    first = EchoGenerator()
    message = rf"{store.path}/.*: the disk is full; free some space, then run again"
    with pytest.raises(OSError, match=message):
        complete_partition(spec, store, KEY, lambda: first, "model")
    manifest = store.partition(COMPLETIONS, KEY).manifest()
    assert manifest is not None
    assert 0 < manifest.num_rows < 60
    ballast.unlink()
    second = EchoGenerator()
    complete_partition(spec, store, KEY, lambda: second, "model")
    assert len(second.requests) == 60 - manifest.num_rows
    assert {row["status"] for row in read_rows(store, COMPLETIONS)} == {"stop"}


def test_a_read_only_disk_is_named(small_disk):
    spec = make_spec(small_disk)
    store = make_store(spec)
    write_prompts(store, [make_prompt(i) for i in range(3)])
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(OSError, match=r"completions/all.*: the disk cannot be written; make it"):
        complete_partition(spec, store, KEY, EchoGenerator, "model")
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    complete_partition(spec, store, KEY, EchoGenerator, "model")


@pytest.mark.parametrize("has_to_run", [True, False])
def test_a_disk_that_turns_read_only_in_a_run_is_named(tmp_path, monkeypatch, has_to_run):
    spec = make_spec(tmp_path, output={"flush_rows": 2})
    store = make_store(spec)
    prompts = [make_prompt(i) for i in range(9)]
    write_prompts(store, prompts)
    if not has_to_run:  # the table alone is to be made again
        complete_partition(spec, store, KEY, EchoGenerator, "model")
        write_prompts(store, prompts[::-1], renumber=True)
    with monkeypatch.context() as patch:
        read_only_from_the_first_commit(patch)
        with pytest.raises(OSError, match=r"completions/all.*: the disk cannot be written; make"):
            complete_partition(spec, store, KEY, EchoGenerator, "model")
    complete_partition(spec, store, KEY, EchoGenerator, "model")
    assert len(read_rows(store, COMPLETIONS)) == 9


def read_only_from_the_first_commit(patch: pytest.MonkeyPatch) -> None:
    """Let nothing be written or deleted any more once a manifest is to be replaced again."""
    replace, is_taken = os.replace, False

    def replace_one(source: str, target: str) -> None:
        nonlocal is_taken
        if target.endswith("manifest.json") and is_taken:
            patch.setattr(os, "replace", refuse)
            patch.setattr(LocalFileSystem, "rm_file", refuse)
            refuse()
        is_taken |= target.endswith("manifest.json")  # that the partition is this writer's
        replace(source, target)

    def refuse(*args: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    patch.setattr(os, "replace", replace_one)


@pytest.mark.parametrize("kind", ["part-", ".tmp-"])
def test_a_disk_that_refuses_to_delete_is_named(tmp_path, monkeypatch, kind):
    spec = make_spec(tmp_path, output={"flush_rows": 2})
    store = make_store(spec)
    prompts = [make_prompt(i) for i in range(9)]
    write_prompts(store, prompts)
    complete_partition(spec, store, KEY, EchoGenerator, "model")
    write_prompts(store, prompts[::-1], renumber=True)
    rm_file = LocalFileSystem.rm_file

    def refuse(fs: LocalFileSystem, path: str) -> None:
        if "/completions/" in path and path.rpartition("/")[2].startswith(kind):
            raise OSError(errno.EROFS, "Read-only file system")
        rm_file(fs, path)

    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "rm_file", refuse)
        message = rf"completions/all/{kind}.*\.parquet: the disk cannot be written; make"
        with pytest.raises(OSError, match=message):
            complete_partition(spec, store, KEY, EchoGenerator, "model")
    complete_partition(spec, store, KEY, EchoGenerator, "model")
    assert len(read_rows(store, COMPLETIONS)) == 9


@pytest.mark.parametrize("table", [COMPLETIONS])
def test_a_part_truncated_anywhere_is_set_aside_and_made_again(tmp_path, table):
    spec = make_spec(tmp_path, output={"flush_rows": 2})
    store = make_store(spec)
    write_prompts(store, [make_prompt(i) for i in range(6)])
    complete_partition(spec, store, KEY, EchoGenerator, "model")
    expected = [row["completion"] for row in read_rows(store, table)]
    size = store.partition(table, KEY).complete_manifest().parts[0].bytes
    for length in sorted(
        {0, 1, 4, 5, size // 3, size // 2, size - 9, size - 8, size - 4, size - 1}
    ):
        partition = store.partition(table, KEY)
        path = partition.part_path(partition.complete_manifest().parts[0])
        os.truncate(path, min(length, os.path.getsize(path) - 1))
        generator = EchoGenerator()
        complete_partition(spec, store, KEY, lambda made=generator: made, "model")
        assert len(generator.requests) == 6, length
        assert [row["completion"] for row in read_rows(store, table)] == expected
        assert not os.path.exists(path)


def test_locks_are_free_after_an_interrupt(tmp_path):
    spec = make_spec(tmp_path, output={"flush_rows": 2})
    store = make_store(spec)
    write_prompts(store, [make_prompt(i) for i in range(9)])

    class Interrupted(EchoGenerator):
        def _answer(self, request):
            if request.input_ids[-1] == 6:
                raise KeyboardInterrupt
            return super()._answer(request)

    with pytest.raises(KeyboardInterrupt):
        complete_partition(spec, store, KEY, Interrupted, "model")
    rest = EchoGenerator()
    complete_partition(spec, store, KEY, lambda: rest, "model")
    assert [request.input_ids[-1] for request in rest.requests] == [6, 8]  # 7 was answered
    for table in TABLES[:3]:
        with store.partition(table, KEY).writer():
            pass
