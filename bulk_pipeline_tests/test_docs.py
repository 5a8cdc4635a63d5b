"""README and docs: every code block runs, links lead somewhere, and what is listed is there.

A page's blocks run one after the other in a project of its own, made as `init` makes one, with the
toy model where the pages have the small one. By language:

- python: runs, in one namespace a page;
- bash, sh: runs, and must succeed; a `text` block right after it is its output (`...` stands for
  anything);
- yaml: settings, which must be valid beside a minimal dataset;
- any of them whose first line is a comment with a path is written to that file instead.

`<!-- skip: next "reason" -->` leaves the next block out.
"""

import ast
import doctest
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import SkipTest

import pytest
import yaml
from sybil import Document, Example
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser, SkipParser

from bulk_pipeline.init import find_project
from bulk_pipeline.spec import BulkInferenceSpec, load_spec

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*/README.md"))
DATASET_PAGE = DOCS / "own_dataset.md"  # other pages go on with the dataset that it sets up
END_OF_SETUP = "## Run it"

FILE = re.compile(r"^(?:#|\{#) (\S+\.\w+)(?: #\})?$")
FENCE = re.compile(r"^```(\w*)", re.MULTILINE)
LINK = re.compile(r"\[[^\]]+\]\(([^)#\s]+)?(#[^)\s]+)?\)")
BASE = {
    "name": "data",
    "source": {"path": "rows.jsonl"},
    "prompt": {"column": "text"},
    "generator": {"model": "owner/name"},
}


@pytest.fixture
def project(tmp_path: Path, toy: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new project as `init` makes it; the model and the environment are where the pages say."""
    for path, text in find_project(tmp_path).files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "data" / "models").mkdir(parents=True)
    (tmp_path / "data" / "models" / "smollm2-135m-instruct").symlink_to(toy)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/.venv/bin{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / ".dagster_home"))
    return tmp_path


def to_file(evaluate: Callable[[Example], str | None]) -> Callable[[Example], str | None]:
    """Write blocks that name a file to it, and evaluate the others."""

    def evaluate_or_write(example: Example) -> str | None:
        first, _, rest = str(example.parsed).partition("\n")
        if not (match := FILE.match(first)):
            return evaluate(example)
        path = Path(match[1])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(rest)
        if path.name == "defs.yaml" and "{{ env." not in rest:
            load_spec(yaml.safe_load(rest)["attributes"])
        return None

    return evaluate_or_write


def run_bash(example: Example) -> str | None:
    command = ["bash", "-euo", "pipefail", "-c", str(example.parsed)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240
    )
    example.namespace["output"] = done.stdout
    return f"exit code {done.returncode}:\n{done.stdout}" if done.returncode else None


def check_output(example: Example) -> str | None:
    wanted, got = str(example.parsed), example.namespace.pop("output")
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    is_so = doctest.OutputChecker().check_output(wanted, got, flags)
    return None if is_so else f"wanted:\n{wanted}\ngot:\n{got}"


def check_settings(example: Example) -> str | None:
    settings = yaml.safe_load(str(example.parsed))
    if unknown := set(settings) - set(BulkInferenceSpec.model_fields):
        return f"not settings: {', '.join(unknown)}; begin with a comment that names the file"
    base = BASE | ({"generator": None} if "generator_resource" in settings else {})
    load_spec(base | settings)
    return None


def parse(page: Path) -> Document:
    evaluators: dict[str, Callable[[Example], Any]] = {
        "python": to_file(PythonEvaluator()),
        "bash": to_file(run_bash),
        "sh": run_bash,
        "text": check_output,
        "yaml": to_file(check_settings),
        "jinja": to_file(lambda example: "begin with a comment that names the file"),
    }
    found = set(FENCE.findall(page.read_text())) - {""}
    assert found <= evaluators.keys(), f"{page.name}: no block in {found - evaluators.keys()} runs"
    parsers = [CodeBlockParser(language, run) for language, run in evaluators.items()]
    return Document.parse(str(page), SkipParser(), *parsers)


def evaluate(document: Document, stop: int | None = None) -> None:
    for example in document.examples():
        if stop is not None and example.start > stop:
            return
        try:
            example.evaluate()
        except SkipTest:
            pass


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_blocks_of_a_page_run(page, project, request):
    if page == DOCS / "object_storage.md":
        request.getfixturevalue("s3").client().create_bucket(Bucket="my-bucket")
    if page not in (DATASET_PAGE, ROOT / "README.md"):
        document = parse(DATASET_PAGE)
        evaluate(document, document.text.index(END_OF_SETUP))
    evaluate(parse(page))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target, anchor in LINK.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.S)):
        if "://" in target:
            continue
        path = page.parent / target if target else page
        assert path.exists(), target
        assert not anchor or anchor[1:] in anchors(path), f"{target}{anchor}"


def test_every_page_is_linked_from_the_readme():
    targets = {target for target, _ in LINK.findall((ROOT / "README.md").read_text())}
    assert {f"docs/{page.name}" for page in DOCS.glob("*.md")} <= targets


def test_the_page_of_settings_is_up_to_date():
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        "import make_settings as m; print(m.settings_page(), end='')",
    ]
    made = subprocess.run(command, cwd=DOCS, capture_output=True, text=True, check=True).stdout
    assert (DOCS / "settings.md").read_text() == made, "run make docs"


def source_texts() -> list[str]:
    """All texts in the package's source; what is filled in stands as …"""
    texts = []
    for path in (ROOT / "bulk_pipeline").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [getattr(value, "value", None) for value in node.values]
                texts.append("".join(part if isinstance(part, str) else "…" for part in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


def test_the_messages_in_troubleshooting_are_those_of_the_source():
    page = (DOCS / "troubleshooting.md").read_text()
    messages = re.findall(r"^### `(.*)`$", page, re.M)
    assert len(messages) > 20
    texts = source_texts()
    assert not [each for each in messages if not any(each in text for text in texts)]


def test_the_targets_of_make_are_there():
    makefile = (ROOT / "Makefile").read_text()
    for page in (*PAGES, *EXAMPLES):
        for target in re.findall(r"(?:^|`)make (\w+)", page.read_text(), re.M):
            assert f"\n{target}:" in makefile, f"{page.name}: make {target}"


@pytest.mark.parametrize(("given", "port"), [([], 3000), (["PORT=3001"], 3001)])
def test_make_dev_takes_a_port(given, port, monkeypatch):
    monkeypatch.delenv("PORT", raising=False)
    command = ["make", "--dry-run", "dev", *given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"dagster dev --port {port}\n" in done.stdout


def test_quoted_measurements_are_those_of_the_benchmarks():
    _, _, section = (DOCS / "how_it_works.md").read_text().partition("## Batch invariance")
    rows = re.findall(r"^\| .*", section, re.M)
    assert len(rows) > 2
    benchmarks = (ROOT / "benchmarks" / "README.md").read_text()
    assert not [row for row in rows if row not in benchmarks]
