"""The report: its numbers, and its Markdown and HTML with hostile rows."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import dagster as dg
import pytest
from click.testing import CliRunner

from bulk_pipeline import build_bulk_inference_defs
from bulk_pipeline.charts import Curve, Text
from bulk_pipeline.cli import main
from bulk_pipeline.engine.request import Completion, Status
from bulk_pipeline.report import NUM_SAMPLES, NUM_SLOWEST, PartitionReport, report_partition
from bulk_pipeline.report_view import MAX_MARKDOWN_BYTES, charts, to_html, to_json, to_markdown
from bulk_pipeline.stages.complete import complete_partition
from bulk_pipeline.tables import finished_partitions
from bulk_pipeline_tests.factories import (
    KEY,
    EchoGenerator,
    make_prompt,
    make_spec,
    make_store,
    write_prompts,
)

KEYS = ("one", "two")
HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)> | [a](http://x) & ünï"


@pytest.fixture
def spec(tmp_path):
    return make_spec(tmp_path)


@pytest.fixture
def store(spec):
    return make_store(spec)


class Timed(EchoGenerator):
    """Says that it runs on a GPU; row i takes i seconds, a quarter of each prompt is cached."""

    provenance: ClassVar[dict[str, Any]] = {"device": "a GPU", "model": "toy", "generator": "timed"}

    def _answer(self, request):
        tokens = request.input_ids
        return Completion(
            request.request_id,
            Status.LENGTH if tokens[-1] == 5 else Status.STOP,
            text=HOSTILE,
            token_ids=tuple(range(tokens[-1] % 8)),
            prompt_tokens=len(tokens),
            cached_tokens=1,
            prefill_seconds=0.25,
            generate_seconds=float(tokens[-1]),
        )


def complete(spec, store, rows=20, key=KEY, **changes):
    bad = [make_prompt(rows, status="invalid", error=HOSTILE, input_ids=[], row_id=HOSTILE)]
    prompts = [make_prompt(i, prompt=HOSTILE, **changes) for i in range(rows)]
    write_prompts(store, [*prompts, *bad], key=key)
    generator = Timed()
    complete_partition(spec, store, key, lambda: generator, "model")


class Tags(HTMLParser):
    """The names of a page's tags and their attributes."""

    def __init__(self, text: str):
        super().__init__()
        self.found: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found |= {tag, *(name for name, _ in attrs)}


def test_numbers_of_a_partition(spec, store):
    complete(spec, store)
    report = report_partition(spec, store, KEY, price_per_hour=3600.0)
    assert report.statuses == {"stop": 19, "invalid": 1, "length": 1}
    assert report.completions.total == sum(i % 8 for i in range(20))
    assert report.prompts.numbers()["max"] == 4
    assert [row["row_index"] for row in report.slowest] == list(range(19, 19 - NUM_SLOWEST, -1))
    assert report.slowest[0]["seconds"] == 19.25
    numbers = report.numbers()
    assert numbers["cached_token_share"] == 0.25
    held = report.totals["seconds"] + report.totals["load_seconds"]
    assert numbers["gpu_seconds"] == pytest.approx(held)
    assert numbers["cost"] == pytest.approx(held)
    tokens = report.totals["completion_tokens"]
    assert numbers["cost_per_million_tokens"] == pytest.approx(held / tokens * 1e6)


def test_drafts_of_all_runs_are_counted(spec, store):
    complete(spec, store)
    report = report_partition(spec, store, KEY)
    assert "draft_acceptance" not in report.numbers()
    report.totals |= {"drafted_tokens": 8, "accepted_tokens": 2}
    assert report.numbers()["draft_acceptance"] == 0.25
    assert "25.0% of 8" in to_html([report])


def test_without_a_price_there_is_no_cost_and_on_a_cpu_no_gpu_seconds(spec, store):
    write_prompts(store, [make_prompt(0)])
    complete_partition(spec, store, KEY, EchoGenerator, "model")
    numbers = report_partition(spec, store, KEY).numbers()
    assert not {"cost", "cost_per_million_tokens", "gpu_seconds"} & numbers.keys()
    assert numbers["generation_seconds"] > 0


def test_the_price_may_stand_in_the_settings(spec, store):
    spec = spec.model_copy(
        update={"output": spec.output.model_copy(update={"price_per_hour": 2.0})}
    )
    complete(spec, store)
    assert report_partition(spec, store, KEY).numbers()["cost"] > 0


def test_each_status_has_samples_with_their_prompts(spec, store):
    complete(spec, store)
    samples = report_partition(spec, store, KEY).samples
    counts = {status: sum(s["status"] == status for s in samples) for status in Status}
    assert counts["stop"] == NUM_SAMPLES
    assert (counts["length"], counts["invalid"]) == (1, 1)
    assert all(sample["prompt"] == HOSTILE for sample in samples if sample["status"] == "stop")


def test_samples_of_a_row_may_take_equally_long(spec, store):
    complete(spec, store, num_samples=2, sampling={"temperature": 1.0})
    slowest = report_partition(spec, store, KEY).slowest
    assert [(row["row_index"], row["sample_index"]) for row in slowest[:3]] == [
        (19, 0), (19, 1), (18, 0),
    ]  # fmt: skip


def test_equal_requests_are_named_once_among_the_slowest(spec, store):
    complete(spec, store, input_ids=[1, 7])
    assert len(report_partition(spec, store, KEY).slowest) == 1


def test_html_needs_nothing_else_and_shows_hostile_text_as_text(spec, store):
    complete(spec, store)
    html = to_html([report_partition(spec, store, KEY)])
    tags = Tags(html).found
    assert not tags & {"script", "img", "link", "iframe", "onerror", "src", "href"}
    assert "&lt;script&gt;alert(1)" in html
    assert "Content-Security-Policy" in html
    assert "ünï" in html
    assert len(html) < 100_000


def test_markdown_shows_pictures_but_no_row_text(spec, store):
    complete(spec, store)
    text = to_markdown(report_partition(spec, store, KEY))
    assert text.count("data:image/svg+xml;base64,") == 5
    assert len(text.encode()) <= MAX_MARKDOWN_BYTES
    assert "<script" not in text
    cells = re.sub(r"\(data:[^)]*\)", "", text)
    assert "alert" not in cells.replace("row-", "")


def test_with_preview_off_no_text_and_no_id_leaves_the_tables(spec, store):
    spec = spec.model_copy(update={"output": spec.output.model_copy(update={"preview": False})})
    complete(spec, store)
    report = report_partition(spec, store, KEY)
    everything = to_html([report]) + to_markdown(report) + json.dumps(to_json(report))
    assert "alert" not in everything
    assert "row-1" not in everything
    assert report.slowest[0]["row_index"] == 19


def test_an_empty_partition_has_a_report(spec, store):
    write_prompts(store, [])
    complete_partition(spec, store, KEY, EchoGenerator, "model")
    report = report_partition(spec, store, KEY, price_per_hour=1.0)
    assert "requests" in to_html([report]) + to_markdown(report)
    assert "cost" not in report.numbers()


def test_unfinished_partitions_have_none(spec, store):
    write_prompts(store, [make_prompt(0)])
    assert finished_partitions(store, "completions") == []
    with pytest.raises(ValueError, match="partition all of completions is missing"):
        report_partition(spec, store, KEY)


def test_the_curve_is_that_of_the_run_that_made_most(spec, store):
    complete(spec, store)
    write_prompts(store, [make_prompt(i) for i in range(22)])
    complete_partition(spec, store, KEY, EchoGenerator, "model")
    report = report_partition(spec, store, KEY)
    assert len(report.runs) == 2
    assert report.longest_run()["settings"]["model"] == "toy"
    titles = [chart.title for chart in charts(report)]
    assert "completion tokens a second" in titles


def test_points_too_close_together_are_no_rate_of_their_own():
    points = [[10.0, 1, 50, 4], [20.0, 2, 100, 4], [20.01, 9, 200, 4]]  # 10,000 tokens/s at the end
    report = PartitionReport("data", KEY, runs=[{"completion_tokens": 200, "points": points}])
    (curve,) = [c for c in charts(report) if c.title == "completion tokens a second"]
    texts = [shape.text for shape in curve.shapes if isinstance(shape, Text)]
    assert "15" in texts  # 150 tokens in the last ten seconds
    (line,) = [shape for shape in curve.shapes if isinstance(shape, Curve)]
    assert len(line.points) == 3


def test_the_output_asset_carries_the_report_and_its_numbers(tmp_path: Path, toy: Path):
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"text": "q {i}"}}\n' for i in range(4)))
    spec = {
        "name": "data",
        "source": {"path": "rows.jsonl"},
        "prompt": {"column": "text"},
        "sampling": {"max_new_tokens": 4},
        "generator": {"model": str(toy), "device": "cpu", "cache_tokens": 1024},
        "output": {"price_per_hour": 1.5},
    }
    defs = build_bulk_inference_defs(spec, tmp_path)
    with dg.DagsterInstance.ephemeral() as instance:
        assert dg.materialize(
            list(defs.assets or []), instance=instance, resources=defs.resources,
            partition_key="all",
        ).success  # fmt: skip
        metadata = {}
        for table in ("completions", "output"):
            records = instance.fetch_materializations(dg.AssetKey(["data", table]), limit=1)
            metadata[table] = records.records[0].asset_materialization.metadata
    found = {name: value.value for name, value in metadata["output"].items()}
    assert found["cost_per_million_tokens"] > 0
    assert found["tokens_per_second"] > 0
    assert found["report"].startswith("**data / all**")
    assert Path(found["path_report"]).read_text().startswith("<!doctype html>")
    made = metadata["completions"]
    assert made["mean_batch"].value > 0
    assert (made["status_length"].value, made["status_error"].value) == (4, 0)


@pytest.fixture
def command(tmp_path: Path, toy: Path, monkeypatch: pytest.MonkeyPatch):
    """The command line over a dataset whose tables a test writes, and their store."""
    spec = {
        "name": "data",
        "source": {"path": "rows.jsonl"},
        "prompt": {"column": "text"},
        "generator": {"model": str(toy), "device": "cpu"},
        "partitions": {"by": "file"},
    }
    module = f"defs_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(
        "from bulk_pipeline import build_bulk_inference_defs\n"
        f"defs = build_bulk_inference_defs({spec!r}, {str(tmp_path)!r})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    spec = make_spec(tmp_path, output={"root": f"{tmp_path}/data/bulk"})
    store = make_store(spec)
    for key in ("one", "two"):
        complete(spec, store, key=key)

    def call(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(main, ["report", "-m", module, *arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return result.exit_code, result.output

    return SimpleNamespace(call=call, store=store, folder=tmp_path)


def test_the_command_writes_a_file_beside_each_output(command):
    code, output = command.call("data")
    paths = [Path(command.store.partition("output", key).path) / "report.html" for key in KEYS]
    assert code == 0
    assert output.splitlines() == [str(path) for path in paths]
    assert all(path.read_text().startswith("<!doctype html>") for path in paths)


@pytest.mark.parametrize("ending", ["html", "md", "json"])
def test_the_command_writes_one_file_where_asked(command, ending):
    out = command.folder / f"report.{ending}"
    code, output = command.call("--out", str(out), "--price-per-hour", "2", "data")
    assert (code, output) == (0, f"{out}\n")
    text = out.read_text()
    assert all(key in text for key in KEYS)
    assert "cost" in text
    code, _ = command.call("--out", str(out), "--partition", "two", "data")
    assert (code, "one" in re.findall(r">(\w+)</h2>|/ (\w+)\*\*", out.read_text())) == (0, False)


def test_the_command_prints_json(command):
    code, output = command.call("--json", "--partition", "two", "data")
    (report,) = json.loads(output)
    assert (code, report["partition"], report["statuses"]["stop"]) == (0, "two", 19)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--partition", "three", "data"], 2, "data has no three; there are one, two"),
        (["--out", "report.pdf", "data"], 2, "--out must end in .html, .md or .json"),
        (["other"], 2, "no dataset other in"),
        (["--out", "no/such/folder/report.html", "data"], 1, "--out: "),
    ],
)
def test_what_the_command_cannot_do_is_one_line(command, arguments, code, message):
    found, output = command.call(*arguments)
    assert (found, len(output.strip().splitlines())) == (code, 1)
    assert message in output
