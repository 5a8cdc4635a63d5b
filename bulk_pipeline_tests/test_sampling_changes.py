"""Sampling changed for a partition by a run: it stays until reset, whoever runs it next."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pytest
import yaml
from click.testing import CliRunner

from bulk_pipeline import build_bulk_inference_defs, load_spec, scan_table
from bulk_pipeline.cli import main
from bulk_pipeline.stages import complete as complete_module
from bulk_pipeline.stages.staleness import find_missing_or_stale
from bulk_pipeline.storage.partition_writer import SET_ASIDE
from bulk_pipeline.storage.schemas import COMPLETIONS, OUTPUT, PROMPTS, TABLES
from bulk_pipeline.storage.store import Store

KEYS = ("first", "second")
NUM_ROWS = 3


class Data:
    """A dataset of two files behind Dagster, and what its runs did."""

    def __init__(self, root: Path, toy: Path, instance: dg.DagsterInstance):
        self.root, self.instance = root, instance
        (root / "rows").mkdir()
        for key in KEYS:
            lines = [json.dumps({"text": f"{key} {i}"}) for i in range(NUM_ROWS)]
            (root / "rows" / f"{key}.jsonl").write_text("\n".join(lines))
        self.values: dict[str, Any] = {
            "name": "data",
            "source": {"path": "rows"},
            "partitions": {"by": "file"},
            "prompt": {"column": "text"},
            "sampling": {"max_new_tokens": 6, "temperature": 0.7, "ignore_eos": True},
            "generator": {"model": str(toy), "device": "cpu", "max_batch_size": 4},
        }
        self.store = Store(f"{root}/data/bulk", "data")

    def definitions(self) -> dg.Definitions:
        return build_bulk_inference_defs(self.values, self.root)

    def run(
        self,
        key: str | None = None,
        tables: tuple[str, ...] = TABLES,
        redo: str = "none",
        **config: Any,
    ) -> dg.ExecuteInProcessResult:
        """Run one partition, or both; `config` is that of the prompts."""
        defs = self.definitions()
        defs.resolve_job_def("data_sync_partitions").execute_in_process(instance=self.instance)
        asked = {PROMPTS: config, COMPLETIONS: {"redo": redo}}
        return dg.materialize(
            list(defs.assets or []),
            instance=self.instance,
            resources=defs.resources,
            selection=[dg.AssetKey(["data", table]) for table in tables],
            tags={
                "dagster/asset_partition_range_start": key or KEYS[0],
                "dagster/asset_partition_range_end": key or KEYS[-1],
            },
            run_config={
                "ops": {
                    f"data__{table}": {"config": asked[table]}
                    for table in tables
                    if asked.get(table)
                }
            },
            raise_on_error=False,
        )

    def num_run(self, key: str | None = None, **kwargs: Any) -> dict[str, int]:
        """Run, and tell how many requests the model answered, by partition."""
        found = self.metadata(self.run(key, **kwargs), COMPLETIONS)
        return {key: metadata["requests_run"].value for key, metadata in found.items()}

    def metadata(self, result: dg.ExecuteInProcessResult, table: str) -> dict[str, Any]:
        assert result.success
        return {
            str(found.partition): found.metadata
            for found in result.asset_materializations_for_node(f"data__{table}")
            if "path" in found.metadata
        }

    def failure(self, result: dg.ExecuteInProcessResult, table: str) -> str:
        found = result.failure_data_for_node(f"data__{table}")
        assert found is not None
        assert found.user_failure_data is not None
        return found.user_failure_data.description or ""

    def answers(self, key: str) -> list[list[int]]:
        table = scan_table(str(self.root / "data/bulk"), "data", COMPLETIONS).collect()
        return table.filter(pl.col("partition") == key)["completion_ids"].to_list()

    def changes(self, key: str) -> dict[str, Any]:
        manifest = self.store.partition(PROMPTS, key).complete_manifest()
        return manifest.meta.get("sampling_changes", {})

    def stale(self) -> dict[str, str]:
        """What the schedule would run, and why."""
        spec = load_spec(self.values).resolve_paths(self.root)
        return find_missing_or_stale(spec, self.store)


@pytest.fixture
def data(tmp_path: Path, toy: Path):
    with dg.DagsterInstance.ephemeral() as instance:
        yield Data(tmp_path, toy, instance)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0, "max_new_tokens": 9},
        {"max_new_tokens": 9},  # which is not part of a request's key
        {"seed": 1},
        {"stop_token_ids": [7], "banned_token_ids": [119, 182], "logit_bias": {"9": -1.0}},
        {"structured_output": {"choice": ["yes", "no"]}, "logprobs": 0},
    ],
    ids=["temperature and limit", "limit", "seed", "lists", "structure"],
)
def test_a_change_stays_with_its_partition_until_it_is_reset(data, sampling):
    assert data.num_run() == {"first": 3, "second": 3}
    before = data.answers("first")
    assert data.num_run("first", sampling=sampling) == {"first": 3}
    changed = data.answers("first")
    assert changed != before
    assert (data.changes("first"), data.changes("second")) == (sampling, {})
    assert data.stale() == {}

    assert data.num_run() == {"first": 0, "second": 0}
    assert data.answers("first") == changed

    assert data.num_run(reset_sampling=True) == {"first": 0, "second": 0}
    assert data.answers("first") == before
    assert data.changes("first") == {}
    assert data.stale() == {}
    assert data.store.partition(COMPLETIONS, "first").complete_manifest().kept == []


def test_changes_add_up_and_all_their_answers_are_kept(data):
    data.num_run()
    before = data.answers("first")
    data.num_run("first", sampling={"temperature": 0.2})
    first_change = data.answers("first")
    assert data.num_run("first", sampling={"seed": 5}) == {"first": 3}
    assert data.changes("first") == {"seed": 5, "temperature": 0.2}
    back = data.run("first", reset_sampling=True, sampling={"temperature": 0.2})
    assert data.metadata(back, COMPLETIONS)["first"]["requests_run"].value == 0
    assert data.answers("first") == first_change
    assert data.num_run("first", sampling={"temperature": 0.7}) == {"first": 0}  # the settings'
    assert data.changes("first") == {}
    assert data.answers("first") == before


def test_other_values_follow_the_settings(data):
    data.num_run("first", sampling={"top_p": 0.5})
    data.num_run("second")
    data.values["sampling"]["temperature"] = 0.3
    assert set(data.stale().values()) == {"settings changed: sampling.temperature"}
    assert data.num_run() == {"first": 3, "second": 3}
    assert data.changes("first") == {"top_p": 0.5}
    assert data.stale() == {}


def test_only_rows_that_changed_run_with_the_changed_sampling(data):
    data.num_run()
    data.num_run("first", sampling={"temperature": 0.2})
    with (data.root / "rows" / "first.jsonl").open("a") as file:
        file.write('\n{"text": "new"}')
    assert data.num_run() == {"first": 1, "second": 0}
    assert data.num_run(reset_sampling=True) == {"first": 1, "second": 0}


def test_a_change_made_for_the_prompts_alone_counts_in_the_next_run(data):
    data.num_run()
    before = data.answers("first")
    assert data.run("first", TABLES[:2], sampling={"temperature": 0.2}).success
    assert data.stale() == {"first": "completions is older than prompts"}
    assert data.num_run() == {"first": 3, "second": 0}
    assert data.answers("first") != before


def test_a_run_that_fails_keeps_both_the_old_and_the_new_answers(data, monkeypatch):
    data.num_run()
    before = data.answers("first")
    with monkeypatch.context() as patch:
        patch.setattr(complete_module, "finish_table", lambda *_: 1 / 0)
        assert not data.run("first", sampling={"temperature": 0.2}).success
    assert data.num_run() == {"first": 0, "second": 0}
    assert data.changes("first") == {"temperature": 0.2}
    assert data.answers("first") != before
    assert data.num_run(reset_sampling=True) == {"first": 0, "second": 0}
    assert data.answers("first") == before


def test_a_redo_makes_the_answers_anew_that_count_now(data):
    data.num_run("first")
    data.num_run("first", sampling={"temperature": 0.2})
    assert data.num_run("first", redo="all") == {"first": 3}
    assert data.num_run("first", reset_sampling=True, redo="all") == {"first": 3}


def test_kept_answers_that_are_torn_are_set_aside_and_run_again(data):
    data.num_run("first")
    data.num_run("first", sampling={"temperature": 0.2})
    partition = data.store.partition(COMPLETIONS, "first")
    (kept,) = partition.complete_manifest().kept
    Path(partition.part_path(kept)).write_bytes(b"torn")
    assert data.num_run("first") == {"first": 0}
    assert (Path(partition.path) / SET_ASIDE / kept.name).exists()
    assert data.num_run("first", reset_sampling=True) == {"first": 3}


def test_another_partition_finds_kept_answers(data):
    data.values["sampling"]["temperature"] = 0.0
    (data.root / "rows" / "second.jsonl").write_text((data.root / "rows/first.jsonl").read_text())
    data.num_run("first")
    data.num_run("first", sampling={"temperature": 0.2})
    assert data.num_run("second") == {"second": 0}


def test_the_metadata_tells_what_differs(data):
    data.num_run()
    result = data.run("first", sampling={"temperature": 0.2, "stop": ["x"]})
    told = 'stop ["x"] (settings: []), temperature 0.2 (settings: 0.7)'
    for table in (PROMPTS, COMPLETIONS):
        assert data.metadata(result, table)["first"]["changed_sampling"].value == told
    plan = data.metadata(result, PROMPTS)["first"]["plan"].value
    assert f"Sampling changed: {told}." in plan
    assert "3 sampling_changed" in plan
    after = data.run()
    assert "changed_sampling" in data.metadata(after, PROMPTS)["first"]
    assert "changed_sampling" not in data.metadata(after, PROMPTS)["second"]
    reset = data.metadata(data.run(reset_sampling=True), PROMPTS)["first"]
    assert "changed_sampling" not in reset
    assert "Sampling changed" not in reset["plan"].value


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temperature": -1.0}, "sampling.temperature: input should be greater than or equal to 0"),
        ({"logit_bias": {"x": 1}}, "sampling.logit_bias.x"),
        ({"min_new_tokens": 7}, "sampling: min_new_tokens must not exceed max_new_tokens (6)"),
        ({"max_new_tokens": 4000}, "sampling.max_new_tokens must leave room for a prompt"),
        ({"stop": ["a</s>"]}, "sampling.stop: 'a</s>' never matches"),
    ],
    ids=["range", "key", "two values", "the model's length", "special token"],
)
def test_a_wrong_value_is_one_line_and_changes_nothing(data, sampling, message):
    data.num_run()
    told = data.failure(data.run("first", (PROMPTS,), sampling=sampling), PROMPTS)
    assert told.startswith(f"1 of 1 partitions failed: first: prompts: {message}")
    assert "\n" not in told
    assert data.changes("first") == {}
    assert data.stale() == {}


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temprature": 1.0}, 'unexpected config entry "temprature" at path .*:sampling'),
        ({"temperature": "hot"}, "Invalid scalar at path .*:sampling:temperature"),
    ],
)
def test_a_wrong_name_or_type_is_refused_before_the_run(data, sampling, message):
    with pytest.raises(dg.DagsterInvalidConfigError, match=message):
        data.run("first", sampling=sampling)


def test_a_change_that_does_not_go_with_new_settings_says_so_until_it_is_reset(data):
    data.num_run("first", sampling={"min_new_tokens": 5})
    data.num_run("second")
    data.values["sampling"]["max_new_tokens"] = 4
    told = (
        "sampling: min_new_tokens must not exceed max_new_tokens (4), got 5; its sampling was "
        "changed (min_new_tokens 5 (settings: 0)): reset that, or set it again"
    )
    assert data.stale()["first"] == told
    assert told in data.failure(data.run("first"), PROMPTS)
    assert data.num_run("first", reset_sampling=True) == {"first": 3}


@pytest.fixture
def module(data, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of definitions of the same dataset, and its DAGSTER_HOME."""
    name = f"defs_{data.root.name}"
    (data.root / f"{name}.py").write_text(
        "from bulk_pipeline import build_bulk_inference_defs\n"
        f"defs = build_bulk_inference_defs({data.values!r}, {str(data.root)!r})\n"
    )
    (data.root / "home").mkdir()
    (data.root / "home" / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    monkeypatch.syspath_prepend(data.root)
    monkeypatch.setenv("DAGSTER_HOME", str(data.root / "home"))
    return name


def call(module: str, *arguments: str) -> tuple[int, str]:
    *command, last = arguments
    result = CliRunner().invoke(main, [*command, "-m", module, last])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output


def test_command_line_changes_tells_and_resets(data, module):
    call(module, "partitions", "sync", "data")
    assert call(module, "run", "data")[0] == 0
    before = data.answers("first")
    changes = ("--set", "sampling.temperature=0.2", "--set", "sampling.stop=[x]")
    code, shown = call(module, "run", "--partition", "first", *changes, "data")
    told = 'sampling changed for first: stop ["x"] (settings: []), temperature 0.2 (settings: 0.7)'
    assert (code, told in shown) == (0, True)
    assert call(module, "run", "data")[0] == 0
    changed = data.answers("first")
    assert changed != before
    for command in ("plan", "status"):
        assert told in call(module, command, "data")[1].splitlines()
    plan = json.loads(call(module, "plan", "--json", "data")[1])
    status = json.loads(call(module, "status", "--json", "data")[1])
    for first, second in (plan["partitions"], status["data"]):
        assert first["changed_sampling"]["temperature"] == {"value": 0.2, "settings": 0.7}
        assert second["changed_sampling"] == {}
    assert plan["to_run"] == 0

    assert call(module, "run", "--reset-sampling", "--json", "data")[0] == 0
    assert data.answers("first") == before
    assert "changed" not in call(module, "plan", "data")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "temperature=1"], "--set must be sampling.NAME=VALUE, got 'temperature=1'"),
        (["--set", "sampling.temperature"], "--set must be sampling.NAME=VALUE"),
        (["--set", "sampling.max_tokens=3"], "sampling.max_tokens is called max_new_tokens here"),
        (["--set", "sampling.temprature=3"], "sampling.temprature is not a setting"),
        (["--set", "sampling.top_p=1.5"], "sampling.top_p: input should be less than or equal"),
        (["--set", "sampling.stop=[a"], "'sampling.stop=[a': the value is not YAML; quote it"),
        (["--reset-sampling", "--until", "raw_dataset"], "sampling is changed in the prompts"),
    ],
)
def test_what_the_command_line_refuses_is_one_line(module, arguments, message):
    code, output = call(module, "run", *arguments, "data")
    assert code == 2
    assert message in output
    assert len(output.strip().splitlines()) == 1


@pytest.mark.slow
def test_dagster_command_line_with_a_config_file(data, module):
    call(module, "partitions", "sync", "data")
    assert call(module, "run", "data")[0] == 0
    config = data.root / "run.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "ops": {
                    "data__prompts": {"config": {"sampling": {"logit_bias": {3: 1.5}, "top_k": 2}}}
                }
            }
        )
    )
    command = [Path(sys.executable).parent / "dagster", "asset", "materialize", "-m", module]
    arguments = ["--select", "group:data", "--partition", "second", "--config", config]
    done = subprocess.run([*command, *arguments], cwd=data.root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert data.changes("second") == {"logit_bias": {"3": 1.5}, "top_k": 2}
    assert data.changes("first") == {}
    assert scan_table(str(data.root / "data/bulk"), "data", OUTPUT).collect().height == 6
