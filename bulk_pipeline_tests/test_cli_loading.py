"""A project in which one file of definitions is bad: the commands of the others work."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from bulk_pipeline.cli import main

COMPONENT = "bulk_pipeline.BulkInferenceComponent"
PYTHON = """
from pathlib import Path
import dagster as dg
from bulk_pipeline import build_bulk_inference_defs

@dg.definitions
def defs():
    return build_bulk_inference_defs({values!r}, Path(__file__).parents[2])
"""

Call = Callable[..., Result]


def attributes(name: str, model: Path) -> dict:
    return {
        "name": name,
        "source": {"path": "rows.jsonl"},
        "prompt": {"column": "text"},
        "sampling": {"max_new_tokens": 4},
        "generator": {"model": str(model), "device": "cpu", "cache_tokens": 1024},
    }


def write(folder: Path, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "defs.yaml").write_text(text)


@pytest.fixture
def project(tmp_path: Path, toy: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Dagster project with the datasets good and nested, one in Python, and its definitions."""
    package = tmp_path / tmp_path.name
    for name, folder in (("good", "good"), ("nested", "group/nested")):
        component = {"type": COMPONENT, "attributes": attributes(name, toy)}
        write(package / "defs" / folder, yaml.safe_dump(component))
    (package / "__init__.py").touch()
    (package / "defs" / "more.py").write_text(PYTHON.format(values=attributes("more", toy)))
    (package / "definitions.py").write_text(
        "from pathlib import Path\nimport dagster as dg\n\n@dg.definitions\ndef defs():\n"
        "    return dg.load_from_defs_folder(path_within_project=Path(__file__).parent)\n"
    )
    (tmp_path / "pyproject.toml").write_text(
        f'[tool.dg]\ndirectory_type = "project"\n[tool.dg.project]\nroot_module = "{package.name}"'
    )
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    return package / "defs"


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


BAD_FILES = {
    "a setting of another name": (
        {"prompt": {"colunm": "text"}},
        "prompt.colunm is not a setting; remove it or correct its name",
    ),
    "a value out of range": (
        {"sampling": {"top_p": 2}},
        "sampling.top_p: input should be less than or equal to 1, got 2",
    ),
    "two problems": (
        {"sampling": {"top_p": 2, "top_k": -1}},
        "got 2; sampling.top_k: input should be greater than or equal to 0, got -1",
    ),
    "a setting that is missing": ({"source": None}, "source: input should be"),
    "no YAML": ("attributes: {name: bad\n", "line 2: expected ',' or '}', but got"),
    "another component": (f"type: {COMPONENT}s\n", "has no attribute `BulkInferenceComponents`"),
    "a list": (f"type: {COMPONENT}\nattributes: [1]\n", "Input should be an object"),
    "no attributes": (f"type: {COMPONENT}\n", "attributes is missing; set name, source"),
}


@pytest.fixture(params=BAD_FILES.values(), ids=BAD_FILES.keys())
def bad(request, project: Path, toy: Path) -> str:
    """The line that tells what is wrong with the dataset bad."""
    content, problem = request.param
    if isinstance(content, dict):
        component = {"type": COMPONENT, "attributes": attributes("bad", toy) | content}
        content = yaml.safe_dump(component)
    write(project / "bad", content)
    return problem


def test_a_bad_file_is_one_line_and_the_other_datasets_are_there(bad):
    result = call("status")
    assert result.exit_code == 0, result.output
    assert result.stdout == "good: 0 partitions\nmore: 0 partitions\nnested: 0 partitions\n"
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"left out: {Path.cwd().name}/defs/bad/defs.yaml: ")
    assert bad in line
    assert "pydantic" not in line


@pytest.mark.parametrize("command", ["status", "plan", "run", "show", "report", "doctor"])
def test_a_command_for_the_bad_dataset_is_that_line(project, toy, command):
    component = {"type": COMPONENT, "attributes": attributes("bad", toy) | {"prompt": {}}}
    write(project / "other_folder", yaml.safe_dump(component))
    result = call(command, "bad")
    assert result.exit_code == 1
    (line,) = result.output.splitlines()
    assert line.startswith(f"Error: {Path.cwd().name}/defs/other_folder/defs.yaml: prompt: set")


def test_a_good_dataset_runs_beside_a_bad_one(project):
    write(project / "bad", "x: [")
    left_out = f"left out: {Path.cwd().name}/defs/bad/defs.yaml: line 1: "
    for command in ("partitions sync", "run", "status", "plan", "show", "report"):
        result = call(*command.split(), "good")
        assert result.exit_code == 0, result.output
        assert result.stderr.count(left_out) == 1
    result = call("partitions", "sync")
    assert result.exit_code == 1
    assert "nested: 0 new partitions" in result.stdout


def test_a_bad_python_file_is_named_too(project):
    text = (project / "more.py").read_text().replace("return ", "raise ValueError('no rows') or ")
    (project / "more.py").write_text(text)
    result = call("status", "good")
    assert result.exit_code == 0
    assert result.stderr == f"left out: {Path.cwd().name}/defs/more.py: no rows\n"
    assert call("status", "more").output.startswith("Error: ")


def test_definitions_that_fail_outside_the_folder_are_one_line(project):
    (project.parent / "definitions.py").write_text("def defs():\n    raise ValueError('broken')\n")
    result = call("status")
    assert result.exit_code == 1
    assert result.output == f"Error: --module: {project.parent.name}.definitions: broken\n"


def test_beside_a_bad_file_folders_of_no_module_are_no_trouble(project):
    (project / ".ipynb_checkpoints").mkdir()
    (project / ".ipynb_checkpoints" / "x.py").write_text("1 / 0")
    (project / "my.data").mkdir()
    (project / "my.data" / "rows.csv").write_text("a\n1\n")
    (project / "broken.py").write_text("raise ValueError('its own reason')")
    result = call("status")
    assert result.exit_code == 0, result.output
    assert result.stdout == "good: 0 partitions\nmore: 0 partitions\nnested: 0 partitions\n"
    assert "broken.py: its own reason" in result.stderr


def test_files_that_do_not_go_together_are_one_line(project):
    text = "import dagster as dg\n\ndefs = dg.Definitions(resources={{'same': '{}'}})\n"
    (project / "one.py").write_text(text.format("a"))
    (project / "two.py").write_text(text.format("b"))
    result = call("status")
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert "same" in result.output
