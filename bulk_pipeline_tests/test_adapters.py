"""LoRA adapters by dataset and by column, through the stages and through Dagster."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bulk_pipeline.engine.adapter_files import adapter_fingerprint, adapter_fingerprints
from bulk_pipeline.engine.doctor import examine
from bulk_pipeline.engine.loading import load_generator, settings_fingerprint
from bulk_pipeline.plan import plan_dataset
from bulk_pipeline.plan_view import to_json, to_text
from bulk_pipeline.spec import GeneratorSettings, load_spec
from bulk_pipeline.stages.complete import complete_partition
from bulk_pipeline.stages.format import format_partition
from bulk_pipeline.stages.ingest import ingest_partition
from bulk_pipeline.stages.join import join_partition
from bulk_pipeline.stages.staleness import find_missing_or_stale
from bulk_pipeline.storage.schemas import COMPLETIONS, OUTPUT, PROMPTS
from bulk_pipeline_tests.adapters import make_adapter
from bulk_pipeline_tests.factories import KEY, EchoGenerator, make_store, read_rows
from bulk_pipeline_tests.test_row_settings import materialize, output, spec

NAMES = [None, "red", "green", "blue"]
QUESTIONS = [f"Question number {i % 3}?" for i in range(12)]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory, toy) -> dict[str, str]:
    root = tmp_path_factory.mktemp("adapters")
    names = [name for name in NAMES if name]
    return {n: str(make_adapter(root / n, toy, seed=s)) for s, n in enumerate(names)}


def values(toy: Path, adapters: dict[str, str], **sampling: Any) -> dict[str, Any]:
    base = spec(toy)
    return base | {
        "generator": base["generator"] | {"adapters": adapters},
        "sampling": {"temperature": 0, "max_new_tokens": 8} | sampling,
    }


class Stages:
    """A dataset of rows, stage by stage."""

    def __init__(self, folder: Path, settings: dict[str, Any], rows: list[dict[str, Any]]):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.spec = load_spec(settings).resolve_paths(folder)
        assert self.spec.generator is not None
        self.generator, self.store = self.spec.generator, make_store(self.spec)
        ingest_partition(self.spec, self.store, KEY)
        self.format()

    def format(self) -> None:
        format_partition(self.spec, self.store, KEY, self.generator)

    def complete(self, generator: Any) -> Any:
        """Run what is missing."""
        return complete_partition(
            self.spec,
            self.store,
            KEY,
            lambda: generator,
            settings_fingerprint(self.generator),
            adapters=adapter_fingerprints(self.generator),
        )

    def rows(self, table: str) -> list[dict[str, Any]]:
        return read_rows(self.store, table)


def mixed_rows() -> list[dict[str, Any]]:
    return [{"text": text, "tone": NAMES[i % 4]} for i, text in enumerate(QUESTIONS)]


def test_each_row_gets_what_its_adapter_gives_alone(tmp_path, toy, adapters):
    by_column = values(toy, adapters, from_columns={"adapter": "tone"})
    result = materialize(tmp_path, toy, mixed_rows(), **by_column)
    assert result.success
    found = output(tmp_path)
    assert [row["row_index"] for row in found] == list(range(12))
    for name in NAMES:
        rows = [row for row in mixed_rows() if row["tone"] == name]
        folder = tmp_path / str(name)
        folder.mkdir()
        assert materialize(folder, toy, rows, **values(toy, adapters, adapter=name)).success
        expected = [row["completion"] for row in output(folder)]
        assert [row["completion"] for row in found if row["tone"] == name] == expected
    assert len({row["completion"] for row in found}) > 8


def test_completions_say_which_adapter_made_them(tmp_path, toy, adapters):
    stages = Stages(tmp_path, values(toy, adapters, from_columns={"adapter": "tone"}), mixed_rows())
    report = stages.complete(load_generator(stages.generator))
    assert report.metadata["requests_by_adapter"] == "3 none, 3 red, 3 green, 3 blue"
    runs = stages.store.partition(COMPLETIONS, KEY).complete_manifest().meta["runs"]
    assert runs[-1]["settings"]["adapters"] == "red, green, blue"
    for row, asked in zip(stages.rows(COMPLETIONS), mixed_rows(), strict=True):
        made = json.loads(row["produced_by"])
        assert "adapters" not in made
        name = asked["tone"]
        fingerprint = name and adapter_fingerprint(Path(adapters[name]))
        assert made.get("adapter") == (name and {"name": name, "fingerprint": fingerprint})


def test_a_row_that_names_no_adapter_of_the_model_is_invalid(tmp_path, toy, adapters):
    rows = [{"text": "Hi", "tone": tone} for tone in ("violet", "", "red", 3)]
    rows = [{name: str(value) for name, value in row.items()} for row in rows]
    stages = Stages(tmp_path, values(toy, adapters, from_columns={"adapter": "tone"}), rows)
    violet, none, red, number = stages.rows(PROMPTS)
    assert (none["status"], red["status"]) == ("ready", "ready")
    assert (violet["status"], number["status"]) == ("invalid", "invalid")
    assert violet["error"] == (
        "column tone: adapter: must be one of generator.adapters (red, green, blue), got 'violet'"
    )
    assert (none["sampling"]["adapter"], red["sampling"]["adapter"]) == (None, "red")


def test_a_row_without_one_has_the_datasets(tmp_path, toy, adapters):
    sampling = {"adapter": "blue", "from_columns": {"adapter": "tone"}}
    stages = Stages(tmp_path, values(toy, adapters, **sampling), mixed_rows()[:2])
    assert [row["sampling"]["adapter"] for row in stages.rows(PROMPTS)] == ["blue", "red"]


def test_requests_come_adapter_by_adapter(tmp_path, toy, adapters):
    stages = Stages(tmp_path, values(toy, adapters, from_columns={"adapter": "tone"}), mixed_rows())
    echo = EchoGenerator()
    stages.complete(echo)
    names = [request.adapter for request in echo.requests]
    changes = sum(a != b for a, b in pairwise(names))
    assert changes == len(set(names)) - 1 == 3


def test_what_was_answered_stays_after_an_error_and_for_a_copy_of_the_adapter(
    tmp_path, toy, adapters
):
    settings = values(toy, adapters, from_columns={"adapter": "tone"})
    whole = Stages(tmp_path / "whole", settings, mixed_rows())
    whole.complete(load_generator(whole.generator))
    stages = Stages(tmp_path / "cut", settings | {"output": {"flush_rows": 1}}, mixed_rows())
    broken = load_generator(stages.generator)
    read = broken._adapters.read

    def fails_at_green(name: str | None) -> Any:
        if name == "green":
            raise OSError("the disk is gone")
        return read(name)

    broken._adapters.read = fails_at_green  # type: ignore[method-assign]
    with pytest.raises(OSError, match="the disk is gone"):
        stages.complete(broken)
    report = stages.complete(load_generator(stages.generator))
    assert 0 < report.metadata["requests_run"] < 12 - report.metadata["requests_shared"]
    columns = ("row_index", "status", "completion", "completion_ids", "request_key")
    assert [[row[name] for name in columns] for row in stages.rows(COMPLETIONS)] == [
        [row[name] for name in columns] for row in whole.rows(COMPLETIONS)
    ]


KILLED = """
import os, sys
from bulk_pipeline_tests.test_adapters import *
folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
stages = Stages(folder, settings, mixed_rows())
generator = load_generator(stages.generator)
use = generator._loop.use_adapter
used = []
def use_and_die(changes):
    used.append(1)
    if len(used) == 3:
        os.kill(os.getpid(), 9)
    use(changes)
generator._loop.use_adapter = use_and_die
stages.complete(generator)
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_was(tmp_path, toy, adapters):
    settings = values(toy, adapters, from_columns={"adapter": "tone"})
    settings |= {"output": {"flush_rows": 1}}
    cut = tmp_path / "cut"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, cut, json.dumps(settings)], capture_output=True
    )
    assert killed.returncode == -9, killed.stderr.decode()
    stages = Stages.__new__(Stages)
    stages.spec = load_spec(settings).resolve_paths(cut)
    assert stages.spec.generator is not None
    stages.generator, stages.store = stages.spec.generator, make_store(stages.spec)
    report = stages.complete(load_generator(stages.generator))
    whole = Stages(tmp_path / "whole", settings, mixed_rows())
    all_of_it = whole.complete(load_generator(whole.generator))
    assert 0 < report.metadata["requests_run"] < all_of_it.metadata["requests_run"]
    names = ("row_index", "completion_ids", "request_key", "status")
    assert [[row[n] for n in names] for row in stages.rows(COMPLETIONS)] == [
        [row[n] for n in names] for row in whole.rows(COMPLETIONS)
    ]


class TestChanges:
    @pytest.fixture
    def own(self, tmp_path, toy) -> dict[str, str]:
        return {n: str(make_adapter(tmp_path / n, toy, seed=i)) for i, n in enumerate("ab")}

    @pytest.fixture
    def stages(self, tmp_path, toy, own) -> Stages:
        rows = [{"text": text, "tone": (None, "a", "b")[i]} for i, text in enumerate("xyz")]
        stages = Stages(tmp_path, values(toy, own, from_columns={"adapter": "tone"}), rows)
        stages.complete(EchoGenerator())
        join_partition(stages.spec, stages.store, KEY, stages.generator)
        assert find_missing_or_stale(stages.spec, stages.store) == {}
        return stages

    def test_of_an_adapters_weights_make_its_rows_run_again(self, stages, own, toy):
        make_adapter(Path(own["a"]), toy, seed=77)
        assert find_missing_or_stale(stages.spec, stages.store) == {KEY: "adapter changed: a"}
        plan = plan_dataset(stages.spec, stages.store, stages.generator)
        assert plan.partitions[0].reasons == {"adapter_changed": 1}
        report = stages.complete(EchoGenerator())
        assert report.metadata["requests_run"] == 1
        assert report.metadata["requests_run_adapter_changed"] == 1

    def test_of_its_place_and_name_change_nothing_that_was_answered(
        self, stages, own, tmp_path, toy
    ):
        Path(own["a"]).rename(tmp_path / "moved")
        settings = values(toy, own | {"a": str(tmp_path / "moved")})
        sampling = stages.spec.sampling
        stages.spec = (
            load_spec(settings).resolve_paths(tmp_path).model_copy(update={"sampling": sampling})
        )
        assert stages.spec.generator is not None
        stages.generator = stages.spec.generator
        assert find_missing_or_stale(stages.spec, stages.store) == {}
        assert stages.complete(EchoGenerator()).metadata["requests_run"] == 0

    def test_of_the_names_make_prompts_stale(self, stages, own, tmp_path, toy):
        settings = values(toy, own | {"c": own["a"]}, from_columns={"adapter": "tone"})
        changed = load_spec(settings).resolve_paths(tmp_path)
        assert find_missing_or_stale(changed, stages.store) == {KEY: "settings changed: adapters"}

    def test_that_take_one_away_are_told(self, stages, own, tmp_path, toy):
        settings = values(toy, {"b": own["b"]}, from_columns={"adapter": "tone"})
        stages.spec = load_spec(settings).resolve_paths(tmp_path)
        assert stages.spec.generator is not None
        stages.generator = stages.spec.generator
        with pytest.raises(ValueError, match=r"rows ask for the adapter 'a', .* make the prompts"):
            stages.complete(EchoGenerator())


def test_the_plan_counts_them(tmp_path, toy, adapters):
    stages = Stages(tmp_path, values(toy, adapters, from_columns={"adapter": "tone"}), mixed_rows())
    plan = plan_dataset(stages.spec, stages.store, stages.generator)
    assert to_json(plan)["adapters"] == {"none": 3, "red": 3, "green": 3, "blue": 3}
    assert "requests by adapter: 3 blue, 3 green, 3 none, 3 red" in to_text(plan)
    gone = stages.generator.model_copy(update={"adapters": adapters | {"green": "no/where"}})
    plan = plan_dataset(stages.spec, stages.store, gone)
    assert any("no/where (generator.adapters.green) is not on this" in n for n in plan.notes)


def test_without_adapters_nothing_is_said_of_them(tmp_path, toy):
    stages = Stages(tmp_path, values(toy, {}), mixed_rows()[:2])
    report = stages.complete(EchoGenerator())
    assert "requests_by_adapter" not in report.metadata
    completions = stages.store.partition(COMPLETIONS, KEY).complete_manifest()
    assert "adapters" not in completions.inputs
    prompts = stages.store.partition(PROMPTS, KEY).complete_manifest()
    assert "adapters" not in prompts.inputs
    assert "adapter" not in prompts.inputs["sampling"]
    plan = plan_dataset(stages.spec, stages.store, stages.generator)
    assert "adapter" not in to_text(plan)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampling": {"adapter": "x"}}, r"adapter must be one of generator.adapters \(red, gree"),
        ({"sampling": {"lora": "x"}}, "sampling.lora is called adapter here; rename it"),
        ({"sampling": {"adapter": ""}}, "sampling.adapter: .*at least 1 character"),
        (
            {"draft": True},
            "generator: adapters do not work with draft_model; set draft_model to null",
        ),
        (
            {"split": True},
            "generator: adapters do not work with tensor_parallel; set that to false",
        ),
    ],
    ids=["unknown", "vLLM's", "empty", "draft", "tensor parallel"],
)
def test_settings_that_cannot_work(toy, adapters, change, message):
    settings = values(toy, adapters, **change.get("sampling", {}))
    if "draft" in change:
        settings["generator"]["draft_model"] = str(toy)
    settings["generator"]["tensor_parallel"] = "split" in change
    with pytest.raises(ValueError, match=message):
        load_spec(settings)


def test_paths_start_at_the_projects_folder(tmp_path, toy, adapters):
    make_adapter(tmp_path / "mine", toy)
    settings = values(toy, adapters | {"own": "mine", "hub": "owner/name"})
    generator = load_spec(settings).resolve_paths(tmp_path).generator
    assert generator is not None
    assert generator.adapters == adapters | {"own": str(tmp_path / "mine"), "hub": "owner/name"}


def test_output_has_the_rows_of_all(tmp_path, toy, adapters):
    stages = Stages(tmp_path, values(toy, adapters, from_columns={"adapter": "tone"}), mixed_rows())
    stages.complete(EchoGenerator())
    join_partition(stages.spec, stages.store, KEY, stages.generator)
    assert [row["tone"] for row in stages.rows(OUTPUT)] == [row["tone"] for row in mixed_rows()]


def test_each_turn_of_a_conversation_has_its_rows_adapter(tmp_path, toy, adapters):
    rows = [{"turns": ["Who?", "And why?"], "tone": name} for name in NAMES]
    by_column = values(toy, adapters, from_columns={"adapter": "tone"})
    by_column["prompt"] = {"turns_column": "turns"}
    assert materialize(tmp_path, toy, rows, **by_column).success
    found = output(tmp_path)
    assert [row["turn"] for row in found] == [0, 1] * 4
    for name in NAMES:
        folder = tmp_path / str(name)
        folder.mkdir()
        alone = values(toy, adapters, adapter=name) | {"prompt": {"turns_column": "turns"}}
        assert materialize(
            folder, toy, [row for row in rows if row["tone"] == name], **alone
        ).success
        expected = [row["completion"] for row in output(folder)]
        assert [row["completion"] for row in found if row["tone"] == name] == expected


class TestDoctor:
    def examine(self, toy: Path, adapters: dict[str, str]) -> Any:
        settings = GeneratorSettings(model=str(toy), device="cpu", adapters=adapters)
        return examine(settings)

    def test_shows_them(self, toy, adapters):
        report = self.examine(toy, adapters)
        assert not report.stops
        assert "adapter        green: rank 4, 14 matrices, 0.000 GiB" in str(report)
        assert json.loads(report.to_json())["model"]["adapters"]["red"]["matrices"] == 14

    def test_says_what_would_stop_a_run(self, toy, tmp_path):
        adapter = make_adapter(tmp_path / "adapter", toy, use_dora=True)
        report = self.examine(toy, {"mine": str(adapter), "lost": "/no/where"})
        assert report.stops
        texts = [problem.text for problem in report.problems if problem.stops]
        assert any(text.startswith("generator.adapters.mine: it uses DoRA") for text in texts)
        assert "generator.adapters.lost: no folder /no/where; correct the path" in texts

    def test_downloads_nothing(self, toy):
        report = self.examine(toy, {"far": "owner/never-published-adapter"})
        assert not report.stops
        assert any("generator.adapters.far: owner/nev" in each.text for each in report.problems)
