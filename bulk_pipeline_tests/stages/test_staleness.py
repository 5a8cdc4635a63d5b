"""What is missing or stale: judged on listings and manifests, and cured by running it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bulk_pipeline.engine.loading import settings_fingerprint
from bulk_pipeline.spec import BulkInferenceSpec, load_spec
from bulk_pipeline.stages import staleness
from bulk_pipeline.stages.complete import complete_partition
from bulk_pipeline.stages.format import format_partition
from bulk_pipeline.stages.ingest import ingest_partition
from bulk_pipeline.stages.join import join_partition
from bulk_pipeline.stages.partitions import plan_partitions
from bulk_pipeline.stages.staleness import find_missing_or_stale, find_removed
from bulk_pipeline.storage.schemas import COMPLETIONS, OUTPUT, PROMPTS, RAW_DATASET
from bulk_pipeline_tests.factories import EchoGenerator, make_spec, make_store


def write(path: Path, *texts: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def set_time(path: Path, seconds: float) -> None:
    os.utime(path, (seconds, seconds))


@pytest.fixture
def spec(tmp_path: Path, toy: Path) -> BulkInferenceSpec:
    for name in ("a", "b", "c"):
        write(tmp_path / "in" / f"{name}.jsonl", f"{name} 1", f"{name} 2")
    model = shutil.copytree(toy, tmp_path / "model")
    return make_spec(
        tmp_path,
        source={"path": f"{tmp_path}/in"},
        partitions={"by": "file"},
        generator={"model": str(model), "device": "cpu"},
        sampling={"max_new_tokens": 8},
    )


def run(spec: BulkInferenceSpec, *keys: str) -> None:
    store, settings = make_store(spec), spec.generator
    assert settings is not None
    for key in keys or plan_partitions(spec, store):
        ingest_partition(spec, store, key)
        format_partition(spec, store, key, settings)
        complete_partition(spec, store, key, EchoGenerator, settings_fingerprint(settings))
        join_partition(spec, store, key)


def find(spec: BulkInferenceSpec) -> dict[str, str]:
    return find_missing_or_stale(spec, make_store(spec))


def change(spec: BulkInferenceSpec, **sections: dict[str, Any]) -> BulkInferenceSpec:
    """The spec with some values of some sections replaced."""
    values = spec.model_dump(exclude_unset=True)
    return load_spec(values | {name: values.get(name, {}) | new for name, new in sections.items()})


def test_what_never_ran_is_missing_and_what_ran_is_done(spec: BulkInferenceSpec) -> None:
    assert find(spec) == {"a": "missing", "b": "missing", "c": "missing"}
    run(spec, "b")
    assert find(spec) == {"a": "missing", "c": "missing"}
    run(spec)
    assert find(spec) == {}


@pytest.mark.parametrize("table", [PROMPTS, COMPLETIONS, OUTPUT])
def test_the_first_table_without_a_result_is_named(spec: BulkInferenceSpec, table: str) -> None:
    run(spec, "a")
    shutil.rmtree(make_store(spec).partition(table, "a").path)
    assert find(spec)["a"] == f"unfinished: {table}"


def test_a_changed_file_makes_its_partition_stale(spec: BulkInferenceSpec, tmp_path: Path) -> None:
    run(spec)
    path = tmp_path / "in/b.jsonl"
    seconds = path.stat().st_mtime
    write(path, "b 1", "b 3")  # as many bytes
    set_time(path, seconds + 1)
    assert find(spec) == {"b": "source changed: b.jsonl"}
    run(spec, "b")
    assert find(spec) == {}


def test_a_touched_file_is_hashed_once_and_not_stale(
    spec: BulkInferenceSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(spec)
    hashed = []
    content_hash = staleness.content_hash
    monkeypatch.setattr(
        staleness, "content_hash", lambda fs, path: hashed.append(path) or content_hash(fs, path)
    )
    assert find(spec) == {}
    assert hashed == []
    set_time(tmp_path / "in/b.jsonl", 1e9)
    assert find(spec) == {}
    assert find(spec) == {}
    assert hashed == [f"{tmp_path}/in/b.jsonl"]


def test_a_large_touched_file_counts_as_changed(
    spec: BulkInferenceSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(spec)
    monkeypatch.setattr(staleness, "MAX_HASH_BYTES", 10)
    set_time(tmp_path / "in/b.jsonl", 1e9)
    assert find(spec) == {"b": "source changed: b.jsonl"}
    run(spec, "b")
    assert find(spec) == {}


def test_a_removed_file_is_no_staleness_but_named(spec: BulkInferenceSpec, tmp_path: Path) -> None:
    run(spec)
    (tmp_path / "in/b.jsonl").unlink()
    store = make_store(spec)
    assert find(spec) == {}
    assert find_removed(store, plan_partitions(spec, store)) == ["b"]
    assert store.partition(OUTPUT, "b").complete_manifest().num_rows == 2


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"prompt": {"system": "Be brief."}}, "settings changed: prompt.system"),
        ({"sampling": {"temperature": 0.5}}, "settings changed: sampling.temperature"),
        (
            {"prompt": {"chat_template": "chatml"}},
            "settings changed: chat_template, prompt.chat_template",
        ),
        ({"generator": {"max_seq_len": 512}}, "settings changed: max_seq_len"),
        ({"generator": {"dtype": "float64"}}, "model changed"),
        ({"source": {"limit": 1}}, "settings changed: source.limit"),
        (
            {"source": {"id_column": "text"}},
            "settings changed: source.id_column, source.id_columns",
        ),
        ({"output": {"reasoning": {}}}, "output settings changed: reasoning"),
        ({"sampling": {"logprobs": 0}}, "settings changed: sampling.logprobs"),
        (
            {"sampling": {"structured_output": {"json_schema": {"type": "object"}}}},
            "settings changed: sampling.structured_output",
        ),
        (
            {"sampling": {"from_columns": {"stop": "text"}}},
            "settings changed: sampling.from_columns",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value.rpartition(" ")[2],
)
def test_changed_settings_are_named_and_cured_by_a_run(
    spec: BulkInferenceSpec, sections: dict[str, Any], reason: str
) -> None:
    run(spec)
    changed = change(spec, **sections)
    assert find(changed) == dict.fromkeys("abc", reason)
    run(changed)
    assert find(changed) == {}
    assert find(spec).keys() == set("abc")  # and back


@pytest.mark.parametrize(
    "sections",
    [{"output": {"flush_rows": 7}}, {"generator": {"max_batch_size": 2}}],
    ids=["flush_rows", "batch"],
)
def test_settings_that_change_no_answer_make_nothing_stale(
    spec: BulkInferenceSpec, sections: dict[str, Any]
) -> None:
    run(spec)
    assert find(change(spec, **sections)) == {}


def _new_weights(model: Path) -> None:
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\1\2\3\4\5\6\7\0")


def _new_template(model: Path) -> None:
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text(template + "{# #}")


@pytest.mark.parametrize(
    ("edit", "reason"),
    [(_new_weights, "model changed"), (_new_template, "settings changed: tokenizer")],
)
def test_a_changed_model_makes_all_stale(
    spec: BulkInferenceSpec, tmp_path: Path, edit: Callable[[Path], None], reason: str
) -> None:
    template = tmp_path / "model/chat_template.jinja"
    if not template.exists():
        config = json.loads((tmp_path / "model/tokenizer_config.json").read_text())
        template.write_text(config.pop("chat_template"))
        (tmp_path / "model/tokenizer_config.json").write_text(json.dumps(config))
    run(spec)
    edit(tmp_path / "model")
    assert find(spec) == dict.fromkeys("abc", reason)
    run(spec)
    assert find(spec) == {}


def test_a_table_made_again_makes_those_after_it_stale(spec: BulkInferenceSpec) -> None:
    run(spec)
    store = make_store(spec)
    ingest_partition(spec, store, "a")
    assert find(spec) == {"a": f"{PROMPTS} is older than {RAW_DATASET}"}
    format_partition(spec, store, "a", spec.generator)  # type: ignore[arg-type]
    assert find(spec) == {"a": f"{COMPLETIONS} is older than {PROMPTS}"}
    fingerprint = settings_fingerprint(spec.generator)  # type: ignore[arg-type]
    complete_partition(spec, store, "a", EchoGenerator, fingerprint)
    assert find(spec)["a"].startswith(f"{OUTPUT} is older than ")


def test_a_limit_reads_no_more_files_than_it_needs_and_is_no_change(
    spec: BulkInferenceSpec,
) -> None:
    limited = change(spec, source={"limit": 3}, partitions={"by": "none"})
    run(limited)
    assert find(limited) == {}


def test_a_grown_file_makes_its_row_ranges_stale(spec: BulkInferenceSpec, tmp_path: Path) -> None:
    by_rows = change(spec, partitions={"by": "rows", "rows": 2})
    run(by_rows)
    assert find(by_rows) == {}
    write(tmp_path / "in/c.jsonl", "c 1", "c 2", "c 3")
    assert find(by_rows) == {
        "rows-000000000004-000000000005": "source changed: c.jsonl",
        "rows-000000000006-000000000007": "missing",
    }
    run(by_rows)
    assert find(by_rows) == {}


def test_a_new_file_in_a_folder_makes_its_partition_stale(
    spec: BulkInferenceSpec, tmp_path: Path
) -> None:
    by_folder = change(spec, partitions={"by": "folder"})
    run(by_folder)
    write(tmp_path / "in/d.jsonl", "d")
    assert find(by_folder) == {"root": "source changed: d.jsonl"}


def test_judging_imports_no_torch(spec: BulkInferenceSpec) -> None:
    run(spec)
    code = f"""
import sys
from bulk_pipeline.spec import load_spec
from bulk_pipeline.stages.staleness import find_missing_or_stale
from bulk_pipeline.storage.store import Store
spec = load_spec({spec.model_dump(exclude_unset=True)!r})
print(find_missing_or_stale(spec, Store(spec.output.root, spec.name)),
      [name for name in ("torch", "transformers", "tokenizers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{} []"
