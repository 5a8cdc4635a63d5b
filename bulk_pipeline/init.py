"""A dataset's first settings: a file of rows in, a `defs.yaml` that loads out.

In a folder without a Dagster project a small one is made around it.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from bulk_pipeline.gpu_lock import list_gpus
from bulk_pipeline.spec import FilesSource
from bulk_pipeline.stages.formats.openai_batch import COLUMNS, SETTING_COLUMNS
from bulk_pipeline.stages.partitions import list_files
from bulk_pipeline.stages.sources import FilesReader, SourceFile

LOOKED_AT = 200  # rows
MOSTLY = 0.9  # share of a column's rows that must be of a kind
HALF = 0.5  # of a column that has a prompt's name: it may have gaps
PACKAGE = "my_datasets"  # of a new project
# Names that a prompt's column has, the likeliest first.
PROMPT_NAMES = (
    "prompt",
    "question",
    "instruction",
    "query",
    "user",
    "input",
    "text",
    "content",
    "message",
    "body",
)
MESSAGES = ({"role", "content"}, {"from", "value"})
ALPACA = "{{ instruction }}{% if input %}\n\n{{ input }}{% endif %}"

PYPROJECT = """\
[project]
name = "{name}"
version = "0.1.0"
dependencies = ["bulk-pipeline"]

[tool.dg]
directory_type = "project"

[tool.dg.project]
root_module = "{package}"
code_location_name = "{package}.definitions"
"""
DEFINITIONS = '''\
"""What Dagster loads: everything in the folder defs."""

from pathlib import Path

import dagster as dg


@dg.definitions
def defs() -> dg.Definitions:
    """All datasets of this project."""
    return dg.load_from_defs_folder(project_root=Path(__file__).parent.parent)
'''
DAGSTER_YAML = """\
# One step at a time on the GPU, whoever starts it; runs that died give their place back.
# The limit is the number of GPUs, each of which takes a step of its own.
concurrency:
  pools:
    default_limit: {num_gpus}
    granularity: op
run_monitoring:
  enabled: true
  free_slots_after_run_end_seconds: 30
telemetry:
  enabled: false
python_logs:
  managed_python_loggers: [bulk_pipeline]
  python_log_level: INFO
"""


@dataclass(frozen=True, slots=True)
class Look:
    """What a look at the source found.

    Attributes
    ----------
    num_files, num_rows
        Files that the path names, and rows that were looked at.
    columns
        Names in the order that they came.
    prompt
        The likeliest settings of `prompt`; empty where no column holds text.
    is_openai_batch
        Whether it holds requests of OpenAI's batch API.
    """

    num_files: int
    num_rows: int
    columns: list[str]
    prompt: dict[str, str]
    is_openai_batch: bool = False


@dataclass(slots=True)
class Project:
    """Where a dataset's settings go.

    Attributes
    ----------
    folder
        The project's root, where relative paths start.
    module
        The Python module with the definitions.
    defs
        The folder with a folder for each dataset.
    files
        What has to be written besides, by path; empty in a project that is there.
    """

    folder: Path
    module: str
    defs: Path
    files: dict[Path, str] = field(default_factory=dict)


def look_at(path: str) -> Look:
    """Look at the first rows of a file, or of the first of several.

    Raises
    ------
    ValueError
        One line, if there is no such file or it cannot be read.
    """
    source = FilesSource(path=os.path.abspath(path))
    files = list_files(source)
    rows = list(islice(_rows(source, files), LOOKED_AT))
    if not rows:
        raise ValueError(f"{path} has no rows; choose a file that has some")
    columns = list(dict.fromkeys(name for row in rows for name in row))
    is_batch = columns == list(COLUMNS)
    prompt = _batch_prompt(rows) if is_batch else guess_prompt(rows)
    return Look(len(files), len(rows), columns, prompt, is_batch)


def _rows(source: FilesSource, files: Sequence[SourceFile]) -> Iterator[dict[str, Any]]:
    for batch in FilesReader(source, files).batches():
        yield from batch.rows if isinstance(batch.rows, list) else batch.rows.to_pylist()


def guess_prompt(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The settings of `prompt` that fit some rows best; empty where no column holds text."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    values = {name: [row.get(name) for row in rows] for name in columns}
    if chats := [name for name in columns if _share(values[name], _is_messages) >= MOSTLY]:
        return {"messages_column": chats[0]}
    if "turns" in columns and _share(values["turns"], _is_texts) >= MOSTLY:
        return {"turns_column": "turns"}
    texts = [name for name in columns if _share(values[name], _is_text) >= MOSTLY]
    by_name = {name.lower(): name for name in columns if _share(values[name], _is_text) >= HALF}
    if by_name.get("instruction") == "instruction" and "input" in columns:
        return {"template": ALPACA}
    if named := next((by_name[name] for name in PROMPT_NAMES if name in by_name), None):
        return {"column": named}
    if not texts:
        return {}
    return {"column": max(texts, key=lambda name: sum(len(v) for v in values[name] if v))}


def _batch_prompt(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The settings of `prompt` for the endpoint that most requests name."""
    num_texts = sum(row["prompt"] is not None for row in rows)
    num_chats = sum(row["messages"] is not None for row in rows)
    if num_texts > num_chats:
        return {"column": "prompt", "chat_template": "raw"}
    return {"messages_column": "messages"}


def _share(values: Sequence[Any], fits: Any) -> float:
    return sum(bool(fits(value)) for value in values) / max(len(values), 1)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_text, value))


def _is_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(turn, dict) and any(m <= turn.keys() for m in MESSAGES) for turn in value
        )
    )


def dataset_name(path: str) -> str:
    """A dataset's name from a file's: letters, digits and _."""
    stem = re.split(r"[.*?\[]", Path(path.rstrip("/")).name)[0] or Path(path).parent.name
    name = re.sub(r"\W+", "_", stem, flags=re.ASCII).strip("_")
    return (name if name[:1].isalpha() else f"data_{name}").rstrip("_")[:64]


def find_project(folder: Path) -> Project:
    """The Dagster project in a folder, or the one to be made there.

    Raises
    ------
    ValueError
        If the folder holds another kind of project.
    """
    pyproject = folder / "pyproject.toml"
    if not pyproject.exists():
        package = folder / PACKAGE
        files = {
            pyproject: PYPROJECT.format(name=PACKAGE.replace("_", "-"), package=PACKAGE),
            package / "__init__.py": "",
            package / "definitions.py": DEFINITIONS,
            folder / ".dagster_home" / "dagster.yaml": DAGSTER_YAML.format(
                num_gpus=max(len(list_gpus()), 1)
            ),
        }
        return Project(folder, f"{PACKAGE}.definitions", package / "defs", files)
    settings = tomllib.loads(pyproject.read_text())
    module = settings.get("tool", {}).get("dg", {}).get("project", {}).get("root_module")
    if module is None:
        raise ValueError(
            f"{pyproject} has no [tool.dg.project] root_module, so that Dagster finds no defs "
            "folder; add it, or name an empty folder with --project"
        )
    places = [folder / base / module.replace(".", "/") for base in ("", "src")]
    package = next((place for place in places if place.is_dir()), places[0])
    return Project(folder, f"{module}.definitions", package / "defs")


def defs_yaml(
    project: Project, path: str, name: str, prompt: dict[str, str], model: str, look: Look
) -> str:
    """The text of the dataset's `defs.yaml`."""
    absolute = Path(os.path.abspath(path))
    inside = absolute.is_relative_to(project.folder.absolute())
    source = absolute.relative_to(project.folder.absolute()) if inside else absolute
    sampling: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 256}
    if look.is_openai_batch:  # what a request does not say is then as neutral as with OpenAI
        sampling = {"max_new_tokens": 1024, "from_columns": SETTING_COLUMNS}
    format_ = {"format": "openai_batch"} if look.is_openai_batch else {}
    attributes = {
        "name": name,
        "source": {"path": str(source), **format_},
        "partitions": {"by": "file" if look.num_files > 1 else "none"},
        "prompt": prompt,
        "sampling": sampling,
        "generator": {"model": model},
        "output": {"formats": ["openai_batch" if look.is_openai_batch else "jsonl"]},
    }
    value = {"type": "bulk_pipeline.BulkInferenceComponent", "attributes": attributes}
    head = "# Every setting is in bulk_pipeline's docs/settings.md; paths start at the project.\n"
    return head + yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=100)


def write_dataset(project: Project, name: str, text: str) -> Path:
    """Write the dataset's `defs.yaml`, and the project around it where there is none.

    Raises
    ------
    FileExistsError
        If a file that would be written is there already; then nothing is written.
    ValueError
        If the result does not load; then nothing stays.
    """
    path = project.defs / name / "defs.yaml"
    files = {**project.files, path: text}
    if there := next((each for each in [path.parent, *files] if each.exists()), None):
        raise FileExistsError(f"{there} is there already; choose another --name or remove it")
    made = [_write(each, content) for each, content in files.items()]
    if reason := _load_error(project, name):
        for first in filter(None, reversed(made)):
            shutil.rmtree(first) if first.is_dir() else first.unlink(missing_ok=True)
        raise ValueError(f"the new dataset does not load: {reason}")
    return path


def _write(path: Path, text: str) -> Path:
    """Write a file; what was made for it: the first new folder above, or the file itself."""
    new = next((each for each in reversed(path.parents) if not each.exists()), path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    return new


def _load_error(project: Project, name: str) -> str | None:
    """Load the definitions as Dagster would, in a process of their own; what went wrong."""
    command = [sys.executable, "-m", "bulk_pipeline.cli", "status", "-m", project.module, name]
    done = subprocess.run(command, cwd=project.folder, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return lines[-1].removeprefix("Error: ")
