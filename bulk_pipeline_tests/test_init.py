"""Init: what it guesses of a file, what it writes, and that the result loads and runs."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import click.testing
import polars as pl
import pytest
import yaml
from click.testing import CliRunner, Result

from bulk_pipeline import scan_table
from bulk_pipeline.cli import main
from bulk_pipeline.init import PACKAGE, dataset_name, find_project, guess_prompt


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which the command is called in; tests' own package can be imported."""
    root = str(Path(__file__).parent.parent)
    monkeypatch.setenv("PYTHONPATH", root)
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def init(*arguments: str, answers: str | None = None) -> Result:
    result = CliRunner().invoke(main, ["init", *arguments], input=answers)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def attributes(path: Path) -> dict:
    value = yaml.safe_load(path.read_text())
    assert value["type"] == "bulk_pipeline.BulkInferenceComponent"
    return value["attributes"]


def write_csv(path: Path, rows: int = 3) -> None:
    path.write_text(
        "id,title,question\n" + "".join(f"{i},t{i},What is {i}?\n" for i in range(rows))
    )


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"id": 1, "prompt": "hi"}, {"column": "prompt"}),
        ({"Question": "hi", "answer": "a much longer text"}, {"column": "Question"}),
        ({"a": "x", "b": "longest of all", "c": "yy"}, {"column": "b"}),
        ({"text": "x", "chat": [{"role": "user", "content": "x"}]}, {"messages_column": "chat"}),
        (
            {"conversations": [{"from": "human", "value": "x"}]},
            {"messages_column": "conversations"},
        ),
        ({"tags": ["role", "content"], "body": "x"}, {"column": "body"}),
        ({"prompt": "x", "turns": ["one", "two"]}, {"turns_column": "turns"}),
        ({"prompt": None, "text": "x"}, {"column": "text"}),
        ({"n": 1, "x": 0.5}, {}),
    ],
    ids=[
        "by name",
        "any case",
        "the longest",
        "OpenAI",
        "ShareGPT",
        "a list",
        "turns",
        "null",
        "none",
    ],
)
def test_the_likeliest_prompt(row, prompt):
    assert guess_prompt([row] * 3) == prompt


def test_a_prompt_s_name_counts_more_than_a_few_gaps():
    rows = [{"question": text, "expected": "some words"} for text in ("a", "b", "", "d")]
    assert guess_prompt(rows) == {"column": "question"}


def test_instruction_and_input_become_a_template():
    ((setting, template),) = guess_prompt(
        [{"instruction": "Do", "input": "", "output": "x"}]
    ).items()
    assert setting == "template"
    assert "{{ instruction }}" in template


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("data/My tickets-2026.csv.gz", "My_tickets_2026"),
        ("2026.jsonl", "data_2026"),
        ("data/tickets/*.jsonl", "tickets"),
        ("rows/", "rows"),
        ("日本.csv", "data"),
    ],
)
def test_a_dataset_is_named_after_its_file(path, name):
    assert dataset_name(path) == name


def test_a_new_project_loads_and_runs(here, toy, monkeypatch):
    write_csv(here / "tickets.csv")
    result = init("--model", str(toy), "tickets.csv")
    assert result.exit_code == 0, result.output
    path = here / PACKAGE / "defs" / "tickets" / "defs.yaml"
    found = attributes(path)
    assert found["source"] == {"path": "tickets.csv"}
    assert found["prompt"] == {"column": "question"}
    assert f"wrote {PACKAGE}/defs/tickets/defs.yaml" in result.output
    assert "prompt.column: 'question'" in result.output
    changed = path.read_text().replace("max_new_tokens: 256", "max_new_tokens: 4")
    path.write_text(changed)
    steps = textwrap.dedent(result.output.split("next:\n")[1])
    assert "bulk-pipeline plan tickets" in steps
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    done = subprocess.run(["bash", "-euc", steps], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "telemetry" not in done.stdout + done.stderr
    assert scan_table("data/bulk", "tickets").collect()["question"].to_list() == [
        "What is 0?",
        "What is 1?",
        "What is 2?",
    ]


def test_a_second_dataset_goes_into_the_same_project_and_files_become_partitions(here, toy):
    write_csv(here / "one.csv")
    assert init("--model", str(toy), "one.csv").exit_code == 0
    before = (here / "pyproject.toml").read_text()
    (here / "rows").mkdir()
    for name in ("a", "b"):
        pl.DataFrame({"text": ["x"]}).write_parquet(here / "rows" / f"{name}.parquet")
    result = init("--model", str(toy), "rows")
    assert result.exit_code == 0, result.output
    found = attributes(here / PACKAGE / "defs" / "rows" / "defs.yaml")
    assert found["partitions"] == {"by": "file"}
    assert found["prompt"] == {"column": "text"}
    assert (here / "pyproject.toml").read_text() == before


def test_options_decide(here, toy):
    (here / "x.jsonl").write_text(json.dumps({"text": "a", "other": "b"}) + "\n")
    model = ("--model", str(toy))
    assert init(*model, "--column", "other", "--name", "one", "x.jsonl").exit_code == 0
    assert attributes(here / PACKAGE / "defs/one/defs.yaml")["prompt"] == {"column": "other"}
    template = "{{ text }}: {{ other }}"
    assert init(*model, "--template", template, "--name", "two", "x.jsonl").exit_code == 0
    assert attributes(here / PACKAGE / "defs/two/defs.yaml")["prompt"] == {"template": template}


def test_on_a_terminal_it_asks(here, toy, monkeypatch):
    write_csv(here / "tickets.csv")
    monkeypatch.setattr(click.testing._NamedTextIOWrapper, "isatty", lambda self: True)
    result = init(answers=f"tickets.csv\ntitle\n{toy}\nmine\n")
    assert result.exit_code == 0, result.output
    found = attributes(here / PACKAGE / "defs" / "mine" / "defs.yaml")
    assert found["prompt"] == {"column": "title"}
    assert found["generator"] == {"model": str(toy)}


def test_nothing_is_overwritten(here, toy):
    write_csv(here / "tickets.csv")
    arguments = ("--model", str(toy), "tickets.csv")
    assert init(*arguments).exit_code == 0
    path = here / PACKAGE / "defs" / "tickets" / "defs.yaml"
    path.write_text("mine")
    result = init(*arguments)
    assert result.exit_code == 2
    assert "is there already; choose another --name or remove it" in result.output
    assert path.read_text() == "mine"


def test_a_package_that_is_there_stays(here, toy):
    write_csv(here / "tickets.csv")
    (here / PACKAGE).mkdir()
    (here / PACKAGE / "__init__.py").write_text("mine = 1\n")
    result = init("--model", str(toy), "tickets.csv")
    assert result.exit_code == 2
    assert (here / PACKAGE / "__init__.py").read_text() == "mine = 1\n"
    assert not (here / "pyproject.toml").exists()


def test_what_does_not_load_is_taken_back(here, toy):
    write_csv(here / "tickets.csv")
    before = sorted(os.listdir(here))
    result = init("--model", str(toy), "--name", "not-a-name", "tickets.csv")
    assert result.exit_code == 1
    assert "the new dataset does not load: " in result.output
    assert sorted(os.listdir(here)) == before


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "FILE is missing"),
        (["gone.csv"], 1, "no files match"),
        (["--model", "m", "--column", "x", "t.csv"], 2, "--column: there is no 'x'; there are id"),
        (["--model", "m", "numbers.jsonl"], 2, "no column holds text; name one with --column"),
        (["t.csv"], 2, "--model is missing"),
        (["--column", "a", "--template", "b", "t.csv"], 2, "--column or --template, not both"),
        (["--model", "m", "empty.jsonl"], 1, "empty.jsonl has no rows"),
        (
            ["--model", "m", "--project", "other", "t.csv"],
            1,
            "has no [tool.dg.project] root_module",
        ),
    ],
)
def test_what_cannot_be_set_up_is_one_line(here, arguments, code, message):
    write_csv(here / "t.csv")
    (here / "numbers.jsonl").write_text('{"n": 1}\n')
    (here / "empty.jsonl").write_text("")
    (here / "other").mkdir()
    (here / "other" / "pyproject.toml").write_text('[project]\nname = "other"\n')
    result = init(*arguments)
    assert result.exit_code == code
    assert message in result.output.splitlines()[-1]
    assert not (here / PACKAGE).exists()


@pytest.mark.parametrize(("gpus", "limit"), [([], 1), (["one"], 1), (["one", "two", "three"], 3)])
def test_a_new_project_lets_a_step_run_on_each_gpu(tmp_path, monkeypatch, gpus, limit):
    monkeypatch.setattr("bulk_pipeline.init.list_gpus", lambda: gpus)
    settings = yaml.safe_load(find_project(tmp_path).files[tmp_path / ".dagster_home/dagster.yaml"])
    assert settings["concurrency"]["pools"] == {"default_limit": limit, "granularity": "op"}
