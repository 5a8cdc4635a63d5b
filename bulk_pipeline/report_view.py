"""Reports as Markdown with pictures, as one HTML file and as JSON; texts in them are escaped."""

import json
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import pairwise
from typing import Any

from bulk_pipeline.charts import Chart, bar_chart, curve_chart, share_chart, to_data_uri, to_svg
from bulk_pipeline.plan_view import format_seconds
from bulk_pipeline.report import PartitionReport
from bulk_pipeline.storage.schemas import OUTPUT
from bulk_pipeline.storage.store import Store

REPORT_FILE = "report.html"

MIN_SPACING = 0.02  # of a run's time, between two points of a curve
MAX_MARKDOWN_BYTES = 90_000  # pictures are left out beyond it
SLOWEST_COLUMNS = {
    "row_index": "row",
    "row_id": "id",
    "sample_index": "sample",
    "turn": "turn",
    "status": "status",
    "prompt_tokens": "prompt tokens",
    "completion_tokens": "new tokens",
    "seconds": "seconds",
    "queue_seconds": "in the queue before",
}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #333; max-width: 1000px; margin: 2em auto;
  padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.25em; border-top: 1px solid #ddd; padding-top: 1em; }
table { border-collapse: collapse; margin: 1em 0; }
th, td { text-align: left; padding: .2em .8em; border-bottom: 1px solid #eee; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
pre { background: #f6f6f6; padding: .6em; white-space: pre-wrap; overflow-wrap: anywhere; }
svg { max-width: 100%; height: auto; margin-right: 8px; vertical-align: top; }
details { margin: .5em 0; }
"""
# Nothing is loaded from elsewhere and nothing runs, whatever a row's text holds.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def to_json(report: PartitionReport) -> dict[str, Any]:
    """Every number of the report, as plain values."""
    return {
        "dataset": report.dataset,
        "partition": report.partition,
        "requests": report.requests,
        "statuses": report.statuses,
        "prompt_tokens": report.prompts.numbers(),
        "completion_tokens": report.completions.numbers(),
        **report.numbers(),
        "runs": report.runs,
        "slowest": report.slowest,
        "samples": report.samples,
    }


def charts(report: PartitionReport) -> list[Chart]:
    """Statuses, lengths, and the curve of the run that made most."""
    found = [share_chart("requests by status", list(report.statuses.items()))]
    for title, lengths in (
        ("prompt lengths", report.prompts),
        ("completion lengths", report.completions),
    ):
        bars = [(str(last), float(rows)) for _, last, rows in lengths.bins()]
        if bars:
            found.append(bar_chart(title, bars, "tokens, up to"))
    run = report.longest_run()
    if run is None or not run["points"]:
        return found
    points = _spaced([[0.0, 0, 0, run["points"][0][3]], *run["points"]])
    rates = [
        (now[0], (now[2] - then[2]) / (now[0] - then[0]))
        for then, now in pairwise(points)
        if now[0] > then[0]
    ]
    if not rates:
        return found
    return [
        *found,
        curve_chart("completion tokens a second", [(0.0, rates[0][1]), *rates], "seconds"),
        curve_chart("requests in generation at once", [(p[0], p[3]) for p in points], "seconds"),
    ]


def _spaced(points: Sequence[Sequence[float]]) -> list[Sequence[float]]:
    """Points so far apart that a rate between two of them says something, the last among them."""
    least = points[-1][0] * MIN_SPACING
    kept = [points[0]]
    for point in points[1:-1]:
        if min(point[0] - kept[-1][0], points[-1][0] - point[0]) >= least:
            kept.append(point)
    return [*kept, points[-1]]


def to_markdown(report: PartitionReport) -> str:
    """The report for the UI: numbers, pictures, slowest rows; no texts of rows."""
    lines = [f"**{report.dataset} / {report.partition}**", "", *markdown_table(_facts(report)), ""]
    pictures = [f"![{chart.title}]({to_data_uri(chart)})" for chart in charts(report)]
    slowest = _slowest(report)
    tail = ["", "Slowest requests", "", *markdown_table(slowest)] if len(slowest) > 1 else []
    text = "\n".join([*lines, *pictures, *tail])
    if len(text.encode()) > MAX_MARKDOWN_BYTES:
        text = "\n".join([*lines, *tail])
    return text


def write_html(store: Store, report: PartitionReport) -> str:
    """Write the report as a file beside the partition's output; where it is."""
    path = f"{store.partition(OUTPUT, report.partition).path}/{REPORT_FILE}"
    with store.open_atomic(path) as file:
        file.write(to_html([report]).encode())
    return path


def to_html(reports: Sequence[PartitionReport]) -> str:
    """One file that needs no other, over one partition or several."""
    title = escape(f"{reports[0].dataset}: report") if reports else "report"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f"<style>{STYLE}</style></head>\n<body><h1>{title}</h1>\n"
        + _contents(reports)
        + "\n".join(map(_section, reports))
        + "\n</body></html>\n"
    )


def _contents(reports: Sequence[PartitionReport]) -> str:
    """A table of the partitions, where there are several."""
    if len(reports) < 2:
        return ""
    head = ["partition", "requests", *sorted({name for each in reports for name in each.statuses})]
    rows = [
        [each.partition, each.requests, *(each.statuses.get(name, 0) for name in head[2:])]
        for each in reports
    ]
    return _html_table([head, *rows])


def _section(report: PartitionReport) -> str:
    parts = [
        f"<h2>{escape(report.partition)}</h2>",
        _html_table(_facts(report)),
        *(to_svg(chart) for chart in charts(report)),
    ]
    slowest = _slowest(report)
    if len(slowest) > 1:
        parts += ["<h3>Slowest requests</h3>", _html_table(slowest)]
    if report.samples:
        parts += ["<h3>Samples</h3>", *map(_sample, report.samples)]
    return "\n".join(parts)


def _facts(report: PartitionReport) -> list[list[Any]]:
    """What stands in the first table: names and values."""
    numbers, totals = report.numbers(), report.totals
    prompts, completions = report.prompts.numbers(), report.completions.numbers()
    facts: list[list[Any]] = [["", ""], ["requests", report.requests]]
    facts += [[f"status {name}", count] for name, count in report.statuses.items()]
    for name, lengths in (("prompt", prompts), ("completion", completions)):
        facts.append(
            [
                f"{name} tokens",
                f"{lengths['total']:,}; median {lengths['p50']}, 95 % up to {lengths['p95']}, "
                f"longest {lengths['max']}",
            ]
        )
    if totals["seconds"]:
        facts += [
            ["generation", f"{format_seconds(totals['seconds'])}, {len(report.runs)} run(s)"],
            ["loading the model", format_seconds(totals["load_seconds"])],
            ["completion tokens a second", f"{numbers['tokens_per_second']:,.1f}"],
            ["requests at once", f"{numbers['mean_batch']:.1f}"],
            ["prompt tokens from the cache", f"{numbers['cached_token_share']:.1%}"],
        ]
    if "draft_acceptance" in numbers:
        share = f"{numbers['draft_acceptance']:.1%} of {totals['drafted_tokens']:,}"
        facts.append(["drafted tokens that were right", share])
    if "gpu_seconds" in numbers:
        facts.append(["GPU-seconds", f"{numbers['gpu_seconds']:,.0f}"])
    if "cost" in numbers:
        facts += [
            ["cost", f"{numbers['cost']:,.4g} at {report.price_per_hour:,.4g} an hour"],
            ["cost of a million new tokens", f"{numbers['cost_per_million_tokens']:,.4g}"],
        ]
    run = report.longest_run()
    if run is not None:
        facts += [[name.replace("_", " "), value] for name, value in run["settings"].items()]
    return facts


def _slowest(report: PartitionReport) -> list[list[Any]]:
    names = [name for name in SLOWEST_COLUMNS if report.slowest and name in report.slowest[0]]
    rows = [
        [f"{row[name]:.2f}" if isinstance(row[name], float) else row[name] for name in names]
        for row in report.slowest
    ]
    return [[SLOWEST_COLUMNS[name] for name in names], *rows]


def _sample(sample: dict[str, Any]) -> str:
    turn = f", turn {sample['turn']}" if sample["turn"] else ""
    place = f"row {sample['row_index']}, sample {sample['sample_index']}{turn} ({sample['row_id']})"
    blocks = [
        f"<p>{name}</p><pre>{escape(sample[name])}</pre>"
        for name in ("prompt", "completion", "error")
        if sample[name]
    ]
    return (
        f"<details><summary>{escape(sample['status'])}: {escape(place)}</summary>"
        f"{''.join(blocks)}</details>"
    )


def _html_table(rows: Iterable[Sequence[Any]]) -> str:
    head, *body = rows
    lines = ["<tr>" + "".join(f"<th>{escape(str(name))}</th>" for name in head) + "</tr>"]
    lines = lines if any(head) else []
    for row in body:
        lines.append("<tr>" + "".join(map(_html_cell, row)) + "</tr>")
    return f"<table>{''.join(lines)}</table>"


def _html_cell(value: Any) -> str:
    if isinstance(value, int):
        return f'<td class="number">{value:,}</td>'
    return f"<td>{escape('' if value is None else str(value))}</td>"


def markdown_table(rows: Sequence[Sequence[Any]]) -> list[str]:
    """Rows, the first of them the head, as the lines of a Markdown table."""
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return ["| " + " | ".join(map(markdown_cell, line)) + " |" for line in lines]


def markdown_cell(value: Any) -> str:
    """A value that cannot end a table's cell or start a tag, a link or an image."""
    text = "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
    for character, escaped in (("&", "&amp;"), ("<", "&lt;"), ("|", "\\|"), ("[", "\\[")):
        text = text.replace(character, escaped)
    return " ".join(text.splitlines())


FORMATS: dict[str, Callable[[Sequence[PartitionReport]], str]] = {
    ".html": to_html,
    ".md": lambda reports: "\n\n".join(map(to_markdown, reports)) + "\n",
    ".json": lambda reports: json.dumps(list(map(to_json, reports)), indent=1, ensure_ascii=False),
}
