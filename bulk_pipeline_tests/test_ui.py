"""Dagster's UI end to end, in headless Chromium: materialise, watch, look, backfill, change.

Screenshots of the way go to build/ui.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from bulk_pipeline import scan_table
from bulk_pipeline_tests.dev import Dev, dagster_dev, wait_for

playwright = pytest.importorskip(
    "playwright.sync_api", reason="needs playwright: pip install playwright"
)
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.ui,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]

ROOT = Path(__file__).parent.parent
SCREENSHOTS = ROOT / "build" / "ui"
SIZE = {"width": 1280, "height": 900}
WITHOUT_NETWORK = ("--no-sandbox", "--disable-background-networking", "--disable-component-update")
KEYS = ("everyday", "knowledge_and_code")
NUM_ROWS = 6  # of each file of the sample
PROJECT = '[project]\nname = "my-project"\nversion = "0"\n[tool.dg]\ndirectory_type = "project"\n'
MINUTE = 60_000  # in milliseconds


@pytest.fixture
def project(tmp_path: Path, toy: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The sample dataset in a project of its own, small and with the toy model."""
    component = yaml.safe_load((ROOT / "bulk_pipeline/defs/demo/defs.yaml").read_text())
    component["attributes"] |= {
        "generator": {"model": str(toy), "device": "cpu", "max_batch_size": 4},
        "sampling": {"temperature": 0, "max_new_tokens": 24},
    }
    package = tmp_path / "my_project"
    (package / "defs" / "demo").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "defs" / "demo" / "defs.yaml").write_text(yaml.safe_dump(component))
    shutil.copy(ROOT / "bulk_pipeline" / "definitions.py", package)
    (tmp_path / "data" / "demo").mkdir(parents=True)
    for key in KEYS:
        lines = (ROOT / f"data/demo/{key}.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / f"data/demo/{key}.jsonl").write_text("".join(lines[:NUM_ROWS]))
    (tmp_path / "pyproject.toml").write_text(
        PROJECT + '[tool.dg.project]\nroot_module = "my_project"\n'
    )
    (tmp_path / "home").mkdir()
    shutil.copy(ROOT / "dagster.yaml", tmp_path / "home")
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    yield tmp_path
    assert not processes_with(str(tmp_path / "home"))


def processes_with(home: str) -> list[str]:
    """The processes of this DAGSTER_HOME, this one apart."""
    found = []
    for process in psutil.process_iter():
        try:
            is_ours = process.environ().get("DAGSTER_HOME") == home and process.pid != os.getpid()
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except (psutil.Error, OSError):
            continue
    return found


def command(project: Path, *arguments: str) -> str:
    program = Path(sys.executable).parent / "bulk-pipeline"
    done = subprocess.run([program, *arguments], cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def page() -> Iterator[Any]:
    """A page of a new browser."""
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=WITHOUT_NETWORK)
        page = browser.new_page(viewport=SIZE)
        page.set_default_timeout(MINUTE)
        yield page
        browser.close()


class User:
    """Somebody at the UI, who takes a picture of each step."""

    def __init__(self, page: Any, dev: Dev):
        self.page, self.dev = page, dev
        self.home = dev.url.removesuffix("/graphql")
        dev.ask("mutation { setNuxSeen }")  # a welcome that would take all clicks
        (location,) = dev.ask(
            "{ workspaceOrError { ... on Workspace { locationEntries { name } } } }"
        )["locationEntries"]
        self.group = f"/locations/{location['name']}/asset-groups/demo/lineage"
        self.run_ids = [run.run_id for run in dev.runs()]
        shutil.rmtree(SCREENSHOTS, ignore_errors=True)
        SCREENSHOTS.mkdir(parents=True)

    def go(self, path: str) -> None:
        self.page.goto(self.home + path)

    def press(self, name: str, exact: bool = False) -> None:
        self.page.get_by_role("button", name=name, exact=exact).last.click()

    def sees(self, text: str) -> None:
        self.page.get_by_text(text).first.wait_for()

    def picture(self, name: str) -> None:
        self.page.wait_for_timeout(500)  # until what moves has arrived
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png")

    def watch(self, picture: str) -> None:
        """Stay on the page of the run that was just launched until it says that it is over."""
        before = set(self.run_ids)
        wait_for(lambda: len(self.dev.runs()) > len(before), "a run that was launched")
        (new,) = {run.run_id for run in self.dev.runs()} - before
        self.run_ids.append(new)
        self.go(f"/runs/{new}")
        ended = self.page.get_by_text(re.compile("^(Success|Failure|Canceled)$"))
        ended.first.wait_for(timeout=5 * MINUTE)
        self.picture(picture)
        assert ended.first.inner_text() == "Success"


def materialise_a_partition(user: User) -> None:
    """From an asset's page."""
    user.go("/assets/demo/raw_dataset")
    user.press("Materialize…")
    user.page.get_by_text("Select a partition").click()
    user.page.get_by_text("everyday", exact=True).first.click()
    user.page.keyboard.press("Escape")
    user.picture("1-materialise")
    user.press("Launch 1 run")
    user.watch("2-run")
    user.go("/assets/demo/raw_dataset?view=partitions&partition=everyday")
    user.sees("dagster/partition_row_count")
    user.picture("3-materialised")


def backfill_all(user: User) -> None:
    """From the picture of all four assets."""
    user.go(user.group)
    user.press("Materialize all")
    user.press("All", exact=True)
    user.picture("4-backfill")
    user.press("Launch backfill")
    user.watch("5-backfill-run")
    user.go(user.group)
    user.page.get_by_text("2 partitions").nth(3).wait_for()
    user.picture("6-assets")


def look_at_metadata_and_checks(user: User) -> None:
    for table, name in (
        ("prompts", "plan"),
        ("completions", "tokens_per_second"),
        ("output", "report"),
    ):
        user.go(f"/assets/demo/{table}?view=partitions&partition=everyday")
        user.page.get_by_text(name, exact=True).first.wait_for()
        user.picture(f"7-{table}")
    user.page.get_by_text("[Show Markdown]").first.click()
    user.sees("prompt tokens from the cache")
    user.picture("8-report")
    user.go("/assets/demo/completions?view=checks")
    user.sees("matches_prompts")
    user.picture("9-checks")


def choose_partition(user: User, key: str) -> None:
    """In the launchpad, which forgets what was typed while it still loads."""
    for attempt in range(6):
        user.page.get_by_placeholder("Partition").fill(key)
        try:
            user.page.get_by_role("menuitem", name=key).click(timeout=MINUTE / 6)
            return
        except playwright.TimeoutError:
            if attempt == 5:
                raise


def change_the_sampling(user: User) -> None:
    """In the launchpad, for one partition."""
    user.go(user.group)
    button = user.page.get_by_role("button", name="Materialize all")
    button.locator("xpath=following::button[1]").click()
    user.page.get_by_text("Open launchpad").click()
    user.sees("No errors")
    choose_partition(user, "everyday")
    user.page.locator(".CodeMirror-line", has_text="reset_sampling").click()
    user.page.keyboard.press("End")
    user.page.keyboard.press("Enter")
    user.page.keyboard.insert_text("sampling: {max_new_tokens: 12}")
    user.sees("No errors")
    user.picture("10-launchpad")
    user.press("Materialize")
    user.watch("11-launchpad-run")
    user.go("/assets/demo/prompts?view=partitions&partition=everyday")
    user.sees("max_new_tokens 12 (settings: 24)")
    user.picture("12-changed-sampling")


def answers(project: Path) -> dict[str, list[list[int]]]:
    """The completions' tokens, by partition."""
    table = scan_table(str(project / "data/bulk"), "demo", "completions").collect()
    by_key = table.partition_by("partition", as_dict=True)
    return {str(key): rows["completion_ids"].to_list() for (key,), rows in by_key.items()}


def test_materialise_watch_backfill_and_change_the_sampling(project: Path, page: Any) -> None:
    assert "2 new partitions" in command(project, "partitions", "sync", "demo")
    with dagster_dev(project) as dev:
        user = User(page, dev)
        try:
            materialise_a_partition(user)
            backfill_all(user)
            before = answers(project)
            look_at_metadata_and_checks(user)
            change_the_sampling(user)
        finally:
            user.picture("13-last")  # where a step failed, what was there instead
        page.context.browser.close()
    plan = command(project, "plan", "demo")
    assert "sampling changed for everyday: max_new_tokens 12 (settings: 24)" in plan.splitlines()
    assert "nothing to run" in plan
    command(project, "run", "demo")
    after = answers(project)
    assert {len(ids) for ids in after["everyday"]} == {12}
    assert after["knowledge_and_code"] == before["knowledge_and_code"]
